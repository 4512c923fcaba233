"""Exchange JSON among all ranks, as tensors over a separate process group, without pickle.

A separate process group keeps these collectives apart from the script's own. The group uses gloo, which works alongside
NCCL and from any thread.
"""

from __future__ import annotations

import json
import threading
import zlib
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.runtime.memory_server.protocol.request import error_of


class Ranks:
    """The ranks that save and load together. Every rank makes this object, and calls its methods in the same order."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._group: dist.ProcessGroup | None = None
        self._one_at_a_time = threading.RLock()
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                # never destroy this group: gloo might wait forever for a rank that has already ended
                self._group = dist.new_group(backend="gloo")

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group

    def all_gather(self, what: str, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank.

        Args:
            what: name of this call, the same on every rank.
            value: this rank's value.

        Raises:
            JobFailedError: the ranks are in calls with different names.
        """
        data = json.dumps(value).encode()
        with self._one_at_a_time:
            sizes = self._sizes(what, len(data))
            if self._group is None:
                return [json.loads(data)]
            mine = _padded(data, max(sizes))
            theirs = [torch.empty_like(mine) for _ in sizes]
            dist.all_gather(theirs, mine, group=self._group)
        return [_read(tensor, size) for tensor, size in zip(theirs, sizes, strict=True)]

    def broadcast(self, what: str, value: Any = None) -> Any:
        """Return rank 0's `value`, which the other ranks need not pass. Collective."""
        data = json.dumps(value).encode() if self.rank == 0 else b""
        with self._one_at_a_time:
            size = self._sizes(what, len(data))[0]
            if self._group is None:
                return json.loads(data)
            padded = _padded(data, size)
            dist.broadcast(padded, src=0, group=self._group)
        return _read(padded, size)

    def vote(self, what: str, error: Exception | None) -> None:
        """Raise an error on all ranks if any rank passes an `error`. Collective.

        Raises:
            HyperpodExtError: the error of the lowest rank that passed one.
        """
        answers = self.all_gather(what, None if error is None else _described(error))
        for rank, described in enumerate(answers):
            if described is not None:
                if self.world_size > 1:
                    described["message"] = f"rank {rank}: {described['message']}"
                raise error_of(described) from error

    def _sizes(self, what: str, size: int) -> list[int]:
        """Return the message lengths of all ranks, after checking that all ranks are in the same call `what`."""
        if self._group is None:
            return [size]
        mine = torch.tensor([zlib.crc32(what.encode()), size], dtype=torch.int64)
        theirs = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(theirs, mine, group=self._group)
        if len({int(each[0]) for each in theirs}) > 1:
            raise JobFailedError(
                f"rank {self.rank} is in the call {what!r}, but other ranks are in other calls",
                hint="All ranks must save, load and call the methods of Tiers in the same order. Wait until an "
                "async_save has ended before the next such call.",
            )
        return [int(each[1]) for each in theirs]


def _described(error: Exception) -> dict[str, Any]:
    if isinstance(error, HyperpodExtError):
        return error.to_json()
    return {"code": "JobFailedError", "message": f"{type(error).__name__}: {error}"}


def _padded(data: bytes, size: int) -> torch.Tensor:
    tensor = torch.zeros(max(size, 1), dtype=torch.uint8)
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor


def _read(tensor: torch.Tensor, size: int) -> Any:
    data = bytearray(size)
    if size:
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor[:size])  # numpy may be missing, so no `tensor.numpy()`
    return json.loads(data)
