"""What all ranks must know alike, exchanged as JSON in tensors over a group of our own. Never pickle.

A group of our own, so that nothing here meets the script's collectives out of order, and on gloo, so
that it works beside NCCL and in a thread.
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
    """The ranks that save and load together. Making one, and every method, is a call for all of them."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._group: dist.ProcessGroup | None = None
        self._one_at_a_time = threading.RLock()
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                # never destroyed by us: gloo may wait for ever for a rank that has ended before
                self._group = dist.new_group(backend="gloo")

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group

    def all_gather(self, what: str, value: Any) -> list[Any]:
        """What every rank says, by rank.

        Args:
            what: names the question; ranks that are at different ones are told so.
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
        """What rank 0 says; the others' `value` does not count."""
        data = json.dumps(value).encode() if self.rank == 0 else b""
        with self._one_at_a_time:
            size = self._sizes(what, len(data))[0]
            if self._group is None:
                return json.loads(data)
            padded = _padded(data, size)
            dist.broadcast(padded, src=0, group=self._group)
        return _read(padded, size)

    def vote(self, what: str, error: Exception | None) -> None:
        """Go on together or fail together.

        Raises:
            HyperpodExtError: of the lowest rank that has one, on every rank alike.
        """
        answers = self.all_gather(what, None if error is None else _described(error))
        for rank, described in enumerate(answers):
            if described is not None:
                if self.world_size > 1:
                    described["message"] = f"rank {rank}: {described['message']}"
                raise error_of(described) from error

    def _sizes(self, what: str, size: int) -> list[int]:
        """Length of each rank's message, all being at `what`."""
        if self._group is None:
            return [size]
        mine = torch.tensor([zlib.crc32(what.encode()), size], dtype=torch.int64)
        theirs = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(theirs, mine, group=self._group)
        if len({int(each[0]) for each in theirs}) > 1:
            raise JobFailedError(
                f"rank {self.rank} is at {what!r}, and other ranks are not",
                hint="Saves, loads and the calls of Tiers are for all ranks, in the same order on each; wait for "
                "an async_save before the next of them.",
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
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor[:size])  # torch may be without numpy
    return json.loads(data)
