"""Load with `dcp.load` from the nearest tier with a step that all ranks can load and verify."""

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


class TieredStorageReader(StorageReader):
    """Loads one step on all ranks, also a step saved with another world size.

    The state changes only after every rank has verified all shards that it needs. If a source fails on one rank, all
    ranks refuse it, and try the next tier or the next older step. No stored or received data is unpickled.

    Args:
        tiers: the tiers to load from.
        step: step to load, instead of a `checkpoint_id` such as `step_100`. Default: the newest step.
    """

    def __init__(self, tiers: Tiers, step: int | None = None) -> None:
        self._tiers, self._step = tiers, step
        self._choice: Choice | None = None
        self._error: HyperpodExtError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def read_metadata(self) -> Metadata:  # with **kwargs, torch would call it once more, for one rank alone
        """Choose a step, and return its metadata over all ranks."""
        self._choice, self._error = None, None
        try:
            self._choice = self._tiers.choose(self._step)
        except HyperpodExtError as error:
            self._error = error  # raised in the next call, because torch would replace it here with its own error
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
        """Verify all shards on all ranks, then copy them. After a failure, all ranks try the next source together."""
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
        """Return a new load plan, for a step that is sharded differently from the damaged one."""
        planner.metadata = metadata  # type: ignore[attr-defined]  # as DefaultLoadPlanner keeps it
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
    """Load a plain value. Planners accept bytes of `torch.save`; these are made here from verified JSON."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    planner.load_bytes(item, stream)
