"""AWS's client of managed tiered checkpointing: its DCP writer and reader, with dcp.async_save as AWS documents it.

The service behind it is closed; `aws_memory.py` speaks its HTTP at the speed of a socket. The client has no
public way to be told another address, and its log file goes to /var/log: both are set from here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from checkpoint.adapters import Adapter, Host, Place
from checkpoint.aws_memory import serving
from checkpoint.state import State


def _client(url: str) -> Any:
    """AWS's modules, pointed to `url`."""
    from amzn_sagemaker_checkpointing.checkpointing.filesystem import filesystem, storage_base
    from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
    from amzn_sagemaker_checkpointing.utils.logging_utils import SageMakerCheckpointingLoggerAdapter

    InMemoryClientConfig.__init__.__defaults__ = (url, *InMemoryClientConfig.__init__.__defaults__[1:])
    logger = logging.getLogger("sagemaker.checkpointing")
    logger.setLevel(logging.ERROR)
    quiet = SageMakerCheckpointingLoggerAdapter(logger, {})
    storage_base._TieredStorageBase._setup_logger = staticmethod(lambda *_: quiet)
    return filesystem


class Tiered(Adapter):
    """A stager as dcp.async_save makes it: new at each save."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig

        self._client = _client(place.host["url"])
        self._config = SageMakerCheckpointConfig(namespace="bench", world_size=place.world_size)
        self._stager: DefaultStager | None = None
        self._saved: Future[Any] | None = None

    @classmethod
    @contextlib.contextmanager
    def hosting(cls, place: Place) -> Iterator[Host]:
        with serving() as (url, pid):
            yield Host({"url": url}, (pid,))

    def save(self, state: State, step: int) -> None:
        self.wait_safe()
        writer = self._client.SageMakerTieredStorageWriter(checkpoint_config=self._config, step=step)
        answer = dcp.async_save(state, storage_writer=writer, async_stager=self._stager)
        assert isinstance(answer, Future)
        self._saved = answer

    def busy(self) -> bool:
        return self._saved is not None and not self._saved.done()

    def wait_safe(self) -> None:
        if self._saved:
            self._saved.result()

    flush = wait_safe

    def restore(self, state: State) -> int:
        reader = self._client.SageMakerTieredStorageReader(checkpoint_config=self._config)
        dcp.load(state, storage_reader=reader)
        return int(reader.step)


class TieredReused(Tiered):
    """One stager for all saves, which its documentation does not mention."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
