"""torch.distributed.checkpoint: save, and async_save in a thread and in a process, each with a stager that is kept."""

from __future__ import annotations

import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from checkpoint.adapters import Adapter, Place
from checkpoint.state import State

warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")


class Save(Adapter):
    """A checkpoint is a directory, whole when `.metadata` is there, which is written last."""

    def save(self, state: State, step: int) -> None:
        dcp.save(state, checkpoint_id=self._folder(step))

    def flush(self) -> None:
        if self.place.world_size > 1:
            dist.barrier()
        if self.place.rank == 0:
            for old in self._whole()[:-1]:
                shutil.rmtree(old)

    def restore(self, state: State) -> int:
        newest = self._whole()[-1]
        dcp.load(state, checkpoint_id=newest)
        return int(newest.name[4:])

    def _folder(self, step: int) -> Path:
        return self.place.folder / f"step{step:08}"

    def _whole(self) -> list[Path]:
        return sorted(whole.parent for whole in self.place.folder.glob("step*/.metadata"))


class AsyncSave(Save):
    """In a thread; or, see Process."""

    kind = AsyncCheckpointerType.THREAD
    shared = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        # pinned, shared, staged in the background, non-blocking; the first and the last are for CUDA
        self._stager = DefaultStager(StagingOptions(False, self.shared, place.overlapped, False))
        self._staged: Future[Any] | None = None
        self._saved: Future[Any] | None = None

    def save(self, state: State, step: int) -> None:
        self.begin(state, step)
        self.wait_staged()

    def begin(self, state: State, step: int) -> None:
        self.wait_safe()  # one save at a time: its users wait for the future of the one before
        answer = dcp.async_save(
            state, checkpoint_id=self._folder(step), async_checkpointer_type=self.kind, async_stager=self._stager
        )
        if isinstance(answer, Future):
            self._staged, self._saved = None, answer
        else:
            self._staged, self._saved = answer.staging_completion, answer.upload_completion

    def wait_staged(self) -> None:
        if self._staged:
            self._staged.result()

    def busy(self) -> bool:
        return self._saved is not None and not self._saved.done()

    def wait_safe(self) -> None:
        if self._saved:
            self._saved.result()

    def flush(self) -> None:
        self.wait_safe()
        super().flush()

    def close(self) -> None:
        self._stager.close()


class Process(AsyncSave):
    """In a process that is started at the first save; what is staged is shared memory."""

    kind = AsyncCheckpointerType.PROCESS
    shared = True
