"""`dcp.load` from the nearest tier that holds a step which all ranks can load, verified by all of them."""

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
    """Loads one step on all ranks, whatever the world size was that saved it.

    Nothing is copied into the state before every rank has verified all that it needs. What fails for one rank
    is refused by all, and the next tier or the next older step is tried. Nothing that was stored or sent is
    ever unpickled.

    Args:
        tiers: where from.
        step: exactly this one; or give it as `checkpoint_id`, `step_100`. Default: the newest.
    """

    def __init__(self, tiers: Tiers, step: int | None = None) -> None:
        self._tiers, self._step = tiers, step
        self._choice: Choice | None = None
        self._error: HyperpodExtError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def read_metadata(self) -> Metadata:  # with **kwargs, torch would call it once more, for one rank alone
        """What the chosen step holds, over all ranks."""
        self._choice, self._error = None, None
        try:
            self._choice = self._tiers.choose(self._step)
        except HyperpodExtError as error:
            self._error = error  # raised a call later, where torch does not replace it by one of its own
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
        """Verify, agree, and only then copy. All ranks are here or none is, so all can turn to another step."""
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
        """For a step that was cut otherwise than the one that turned out to be damaged."""
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
    """Planners take values as the bytes of torch.save; these are ours, made here from JSON that was verified."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    planner.load_bytes(item, stream)
