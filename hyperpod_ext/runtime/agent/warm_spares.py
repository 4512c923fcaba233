"""Processes that have their imports done and a CUDA context made, and wait to become a worker.

A new process makes its context first: 0.15 s and 684 MiB on an H200. The fork server keeps one spare for each worker of
its node: it is forked while the job trains, and becomes the next worker of its local rank. A spare without room on its
GPU ends. What was run on a GPU: docs/gpu.md, "Warm spares".
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.agent import worker_main

_READY = b"r"
_ROOM = 1 / 16
"""Part of a GPU's memory that must be free beside the contexts: else the spare takes what the job needs."""

Fork = Callable[[Callable[[], NoReturn]], int]
"""Process id of a child in which the given function runs; its parent is the agent."""


@dataclass(frozen=True)
class _Spare:
    pid: int
    line: socket.socket


class WarmSpares:
    """The fork server's spares, by local rank."""

    def __init__(self, fork: Fork, agent_pid: int) -> None:
        self._fork, self._agent_pid = fork, agent_pid
        self._spares: dict[int, _Spare] = {}

    def keep(self, local_ranks: list[int]) -> list[int]:
        """Have one for each of these, if this node has a GPU; returns the process ids of new ones."""
        if not self._gpus:
            return []
        for local_rank in [*self._spares]:
            if self._has_ended(self._spares[local_rank]):
                self._spares.pop(local_rank).line.close()
        missing = [local_rank for local_rank in local_ranks if local_rank not in self._spares]
        return [self._start(local_rank) for local_rank in missing]

    @cached_property
    def _gpus(self) -> int:
        return _count_gpus()

    def take(self, order: dict[str, Any]) -> int | None:
        """Have the spare of the order's local rank become that worker: its process id. None: there is none yet."""
        local_rank = int(order["env"]["LOCAL_RANK"])
        spare = self._spares.get(local_rank)
        if spare is None or not _is_ready(spare):
            return None
        del self._spares[local_rank]
        with spare.line, contextlib.suppress(OSError):  # it has ended
            spare.line.recv(len(_READY))
            spare.line.sendall(json.dumps(order).encode() + b"\n")
            return spare.pid
        return None

    def forget(self) -> None:
        """In a forked child: the spares are not its own."""
        for spare in self._spares.values():
            spare.line.close()
        self._spares.clear()

    def _start(self, local_rank: int) -> int:
        ours, theirs = socket.socketpair()
        with theirs:

            def run() -> NoReturn:
                self.forget()
                ours.close()
                _wait(theirs, local_rank, self._agent_pid)

            pid = self._fork(run)
        self._spares[local_rank] = _Spare(pid, ours)
        return pid

    @staticmethod
    def _has_ended(spare: _Spare) -> bool:
        return _peeked(spare) == b""


def _count_gpus() -> int:
    """GPUs of this node, 255 at most. A child asks: torch asks NVML, which leaves a thread and open devices behind, and
    whoever forks should have neither."""
    pid = os.fork()
    if pid == 0:
        try:
            import torch

            os._exit(min(torch.cuda.device_count(), 255))
        except BaseException:  # nothing of this process may go on as the fork server
            traceback.print_exc()
            os._exit(0)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _is_ready(spare: _Spare) -> bool:
    return _peeked(spare) == _READY


def _peeked(spare: _Spare) -> bytes | None:
    """What it has said; nothing: it has ended; None: it is not ready yet."""
    try:
        return spare.line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""


def _wait(line: socket.socket, local_rank: int, agent_pid: int) -> NoReturn:
    """The spare's life: make the context, and become the worker that is asked for. Ends with the fork server."""
    worker_main.close_inherited(kept=line.fileno())
    worker_main.wait_adopted(agent_pid)
    die_with_parent(agent_pid)
    order = b""
    try:
        if _make_context(local_rank):
            line.sendall(_READY)
            with line.makefile("rb") as orders:
                order = orders.readline()
    except Exception as error:  # a worker that is wanted is forked anew, and meets the same where it matters
        sys.stderr.write(f"the warm spare of local rank {local_rank} ended: {error}\n")
    if not order.endswith(b"\n"):
        os._exit(0)
    line.close()
    worker_main.main(json.loads(order), agent_pid)


def _make_context(local_rank: int) -> bool:
    """Whether the GPU has room for what the job needs beside it."""
    import torch

    torch.cuda.set_device(local_rank % torch.cuda.device_count())  # as the worker will
    torch.cuda.current_blas_handle()
    free, total = torch.cuda.mem_get_info()
    if free < _ROOM * total:
        free_mib, needed_mib = free >> 20, int(_ROOM * total) >> 20
        why = f"{free_mib} MiB of its GPU are free, less than {needed_mib} MiB"
        sys.stderr.write(f"no warm spare for local rank {local_rank}: {why}\n")
        return False
    return True
