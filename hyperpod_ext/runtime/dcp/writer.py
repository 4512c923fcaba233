"""Save with `dcp.save` and `dcp.async_save` to the checkpoint tiers."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hyperpod_ext.errors import ConfigError, JobFailedError, Problem
from hyperpod_ext.runtime.dcp.state import parts_of
from hyperpod_ext.runtime.dcp.steps import Save, names_step, step_of
from hyperpod_ext.runtime.dcp.tiers import Tiers


class TieredStorageWriter(StorageWriter):
    """Saves to shared memory that outlives the process. The checkpoint policy determines the copies to slower tiers.

    `dcp.save` returns when every rank's state is complete and checksummed in its node's memory. If one rank cannot
    save, `dcp.save` raises on all ranks, and the previous checkpoint is unchanged.

    Each rank saves the whole state in its local plan, including state that other ranks also save, and not only the part
    that the planner assigns to the rank. So each rank can restore its state from its own node's memory. A durable tier
    stores equal snapshots of several ranks only once.

    Args:
        tiers: the tiers to save to.
        step: step of this checkpoint; a `checkpoint_id` such as `step_100` in `dcp.save` takes precedence.
    """

    def __init__(self, tiers: Tiers, step: int | None = None) -> None:
        self._tiers, self._step = tiers, step
        self._save: Save | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._step is None or self._step < 0:
            hint = "write TieredStorageWriter(tiers, step=step), or checkpoint_id=f'step_{step}'"
            raise ConfigError([Problem(f"the checkpoint's step is {self._step}, but must be 0 or more", hint=hint)])
        self._save = self._tiers.begin_save(self._step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if getattr(plan, "usable", True):  # skip an unchanged plan, which a planner with a cache marks as not usable
            self._tiers.local_plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        save, error = self._save, None
        if save is None:
            raise JobFailedError(
                "TieredStorageWriter.write_data was called without a call of set_up_storage_writer before it",
                hint="Save with dcp.save or dcp.async_save, which call both.",
            )
        self._save = None
        try:
            own = self._tiers.local_plan or plan
            self._tiers.copy(save, parts_of(own.items, planner, own.planner_data or {}))
        except Exception as problem:  # `end_save` will raise this error on all ranks
            error = problem
        self._tiers.end_save(save, error)
        written: Future[list[WriteResult]] = Future()
        written.set_result([])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: `write_data` has completed the save, and the memory server makes the metadata from snapshots."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return names_step(checkpoint_id)

    def __getstate__(self) -> Any:
        raise JobFailedError(
            "a TieredStorageWriter cannot be sent to another process",
            hint="Call dcp.async_save with AsyncCheckpointerType.THREAD. No other process is needed, because the "
            "memory server already copies in the background.",
        )
