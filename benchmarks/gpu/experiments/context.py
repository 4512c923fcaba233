"""E0: what a process costs on the GPU: seconds to make its context, memory that it takes, and how soon the memory
of one that is killed is free again. On CPU the resident memory of the processes stands for the GPU's."""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path

import torch
from lane import Lane
from rank import Rank
from rank_processes import RankProcesses
from results import Figure, Figures

_HELD_MIB = {"cuda": 20 << 10, "cpu": 64}
_SLACK_MIB = 64.0
"""Memory counts as free when no more than this is left of it."""
_LIMIT_S = 60.0


def run(lane: Lane) -> Figures:
    alone = _contexts(lane, 1)
    four = _contexts(lane, 4)
    return (
        {f"one process: {name}": figure for name, figure in alone.items()}
        | {f"four at once: {name}": figure for name, figure in four.items()}
        | _killed(lane)
    )


def _contexts(lane: Lane, processes: int) -> Figures:
    memory = _Memory(lane)
    with RankProcesses(lane, "context:body", processes, held_mib=0) as ranks:
        ready = ranks.until("ready", _LIMIT_S * lane.patience).values()
        used = memory.used_mib(ranks) / processes
        ranks.tell("end")
        ranks.end()
    return {
        "context": Figure(max(one["context_s"] for one in ready), "s"),
        "first matrix product": Figure(max(one["product_s"] for one in ready), "s"),
        "memory of each": Figure(used, "MiB"),
    }


def _killed(lane: Lane) -> Figures:
    memory, held = _Memory(lane), _HELD_MIB[lane.device]
    with RankProcesses(lane, "context:body", 1, held_mib=held) as ranks:
        ranks.until("ready", _LIMIT_S * lane.patience)
        used = memory.used_mib(ranks)
        assert used >= held, f"{used:g} MiB are in use, and the process holds {held}"
        killed = ranks.kill(0)
        reaped = time.monotonic()
        while (left := memory.used_mib(ranks)) > _SLACK_MIB:
            assert time.monotonic() < killed + _LIMIT_S, f"{left:g} MiB are still in use"
        free = time.monotonic()
    return {
        f"kill -9 with {held} MiB, until it is reaped": Figure(reaped - killed, "s"),
        f"kill -9 with {held} MiB, until they are free": Figure(free - killed, "s"),
    }


def body(rank: Rank) -> None:
    began = time.monotonic()
    torch.zeros(1, device=rank.device)
    rank.synchronize()
    context_s, began = time.monotonic() - began, time.monotonic()
    torch.mm(torch.ones(64, 64, device=rank.device), torch.ones(64, 64, device=rank.device))
    rank.synchronize()
    product_s = time.monotonic() - began
    held = torch.ones(rank.options["held_mib"] << 20, dtype=torch.uint8, device=rank.device)
    rank.synchronize()
    rank.report("ready", context_s=context_s, product_s=product_s)
    rank.wait_for("end")
    del held


class _NvmlMemory(ctypes.Structure):
    """`nvmlMemory_t`, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Memory:
    """Memory that is used beyond what was when this was made."""

    def __init__(self, lane: Lane) -> None:
        self._device = None if lane.fake else ctypes.c_void_p()
        if self._device is not None:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            _check(self._nvml.nvmlInit_v2())
            _check(self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(self._device)))
        self._before = self._used_mib([])

    def used_mib(self, ranks: RankProcesses) -> float:
        return self._used_mib([ranks.pid(rank) for rank in ranks.living()]) - self._before

    def _used_mib(self, pids: list[int]) -> float:
        if self._device is None:
            return sum(map(_resident_mib, pids))
        memory = _NvmlMemory()
        _check(self._nvml.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)))
        return float(memory.used) / 2**20


def _check(code: int) -> None:
    if code != 0:
        raise OSError(f"NVML error {code}")


def _resident_mib(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return 0.0
