"""`dcp.save` and `dcp.async_save` into the tiers."""

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
    """Saves into shared memory that outlives the process; copies to slower tiers follow by the policy.

    `dcp.save` returns when every rank's state is whole and checksummed in its node's memory. Where one rank
    cannot save, it raises on all, and the checkpoint before is untouched.

    Each rank keeps all that its plan names, also what other ranks hold alike, and not the share that the
    planner would have it write: so it can restore from its own memory. Where ranks' images are equal, the
    durable tiers store one of them.

    Args:
        tiers: where to.
        step: what this checkpoint is called; or give it as `checkpoint_id`, `step_100`.
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
            hint = "TieredStorageWriter(tiers, step=step), or checkpoint_id=f'step_{step}'"
            raise ConfigError([Problem("a checkpoint needs a step, 0 or more", hint=hint)])
        self._save = self._tiers.begin_save(self._step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if getattr(plan, "usable", True):  # a planner that caches sends its plan only where it is new
            self._tiers.local_plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        save, error = self._save, None
        if save is None:
            raise JobFailedError("write_data before set_up_storage_writer")
        self._save = None
        try:
            own = self._tiers.local_plan or plan
            self._tiers.copy(save, parts_of(own.items, planner, own.planner_data or {}))
        except Exception as problem:  # told to all ranks, and raised on each
            error = problem
        self._tiers.end_save(save, error)
        written: Future[list[WriteResult]] = Future()
        written.set_result([])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is left to do: the ranks have agreed, and the memory server derives the metadata."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return names_step(checkpoint_id)

    def __getstate__(self) -> Any:
        raise JobFailedError(
            "the tiers' writer cannot be sent to another process",
            hint="dcp.async_save with AsyncCheckpointerType.THREAD: the memory server is the other process already.",
        )
