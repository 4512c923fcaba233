"""DLRover's flash checkpoint: DdpCheckpointer into shared memory, with its saver in a process that outlives workers.

Its agent, `dlrover-run`, does not start with this torch; the host runs the saver that the agent would run,
and workers are told, as the agent tells them, not to start one of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoint.adapters import Adapter, Host, Place
from checkpoint.state import State, leaves, local_state


def _environment(place: Place) -> None:
    job = "bench-" + place.folder.name
    os.environ |= {
        "TORCHELASTIC_RUN_ID": job,
        "ELASTIC_JOB_NAME": job,
        "ROLE_NAME": "dlrover-trainer",
        "DLROVER_LOG_LEVEL": "ERROR",
    }
    if place.replicas:  # each rank is a node
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(place.rank)}
        os.environ |= {"NODE_NUM": str(place.world_size), "GROUP_RANK": str(place.rank)}


def _quiet() -> None:
    from dlrover.python.common.log import default_logger

    default_logger.setLevel(logging.ERROR)


class Flash(Adapter):
    @classmethod
    @contextlib.contextmanager
    def hosting(cls, place: Place) -> Iterator[Host]:
        _environment(place)
        _quiet()
        from dlrover.python.common.multi_process import SOCKET_TMP_DIR
        from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver

        AsyncCheckpointSaver.start_async_saving_ckpt()
        try:
            yield Host()
        finally:
            saver: Any = AsyncCheckpointSaver._saver_instance
            for handler in saver._shm_handlers if saver else ():
                handler.unlink()
            shutil.rmtree(Path(SOCKET_TMP_DIR) / os.environ["TORCHELASTIC_RUN_ID"], ignore_errors=True)

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        _environment(place)
        _quiet()
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        shards = {"local_shard_num": place.world_size, "global_shard_num": place.world_size}
        self._checkpointer = DdpCheckpointer(str(place.folder), **shards)

    def save(self, state: State, step: int) -> None:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        self._checkpointer.save_checkpoint(step, local_state(state), storage_type=StorageType.MEMORY)
        if self._checkpointer._engine._cached_step != step:
            raise RuntimeError("the save was skipped")

    @torch.no_grad()
    def restore(self, state: State) -> int:
        deadline = time.monotonic() + 10
        while True:
            step, saved = self._checkpointer._engine.get_state_dict_from_memory()
            if saved or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        (saved,) = saved.values()
        for mine, theirs in zip(leaves(local_state(state)), leaves(saved), strict=True):
            mine.copy_(theirs)
        return int(step)

    def close(self) -> None:
        self._checkpointer._engine.close()
