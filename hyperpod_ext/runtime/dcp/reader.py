"""Load with `dcp.load`, from the fastest tier that has a step which all ranks can load and verify."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.dcp.choice import Choice
from hyperpod_ext.runtime.dcp.steps import names_step, step_of
from hyperpod_ext.runtime.dcp.tiers import Tiers

ShardKey = tuple[str, tuple[int, ...]]
"""A shard: name of the tensor, and offsets of the shard in it."""


class TieredStorageReader(StorageReader):
    """Loads one step on all ranks, even if the step was saved with another world size.

    The script's state changes only after every rank has verified all shards that it needs. If a source fails on one
    rank, all ranks try the next tier, or the next older step. No stored or received data is unpickled.

    Args:
        tiers: the tiers to load from.
        step: the step to load; a `checkpoint_id` such as `step_100` in `dcp.load` takes precedence; None: the newest
            step.
    """

    def __init__(self, tiers: Tiers, step: int | None = None) -> None:
        self._tiers, self._step = tiers, step
        self._choice: Choice | None = None
        self._error: HyperpodExtError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    # do not add **kwargs: torch would then call this method once more, on one rank only
    def read_metadata(self) -> Metadata:
        """Choose a step, and return the metadata of all ranks' snapshots of that step."""
        self._choice, self._error = None, None
        try:
            self._choice = self._tiers.choose(self._step)
        except HyperpodExtError as error:
            # let `set_up_storage_reader` raise the error, because torch would replace an error that is raised here
            self._error = error
            return Metadata({})
        return self._choice.contents.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify the shards on all ranks, then copy them. If a source fails, all ranks try another source together."""
        choice = self._choice
        assert choice is not None, "read_data before read_metadata"
        while failures := choice.verify(_place(item) for item in plan.items if item.type is LoadItemType.TENSOR):
            before = choice.contents.metadata.state_dict_metadata
            choice = self._choice = self._tiers.choose(self._step, failures)
            if choice.contents.metadata.state_dict_metadata != before:
                plan = self._plan_again(planner, choice.contents.metadata)
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                _copy(item, choice.shard(_place(item)), planner)
            else:
                _give(item, choice.value(item.storage_index.fqn), planner)
        self._tiers.loaded(choice.step)
        self._choice = None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @staticmethod
    def _plan_again(planner: LoadPlanner, metadata: Metadata) -> LoadPlan:
        """Return a new load plan, for an older step whose sharding differs from the damaged step's."""
        planner.metadata = metadata  # type: ignore[attr-defined]  # an attribute of DefaultLoadPlanner
        return planner.finish_plan(planner.create_local_plan())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return names_step(checkpoint_id)


def _place(item: ReadItem) -> ShardKey:
    return item.storage_index.fqn, tuple(item.storage_index.offset or ())


def _copy(item: ReadItem, shard: torch.Tensor, planner: LoadPlanner) -> None:
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        shard = shard.narrow(dimension, start, length)
    destination = planner.resolve_tensor(item).detach()
    if destination.shape != shard.shape:
        raise ValueError(f"{item.dest_index.fqn}: {tuple(shard.shape)} does not fit into {tuple(destination.shape)}")
    destination.copy_(shard)
    planner.commit_tensor(item, destination)


def _give(item: ReadItem, value: Any, planner: LoadPlanner) -> None:
    """Load a plain value, which was read from verified JSON.

    The value is converted to bytes by `torch.save`, because planners accept only such bytes.
    """
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    planner.load_bytes(item, stream)
