"""E8: copies between the GPU and the memory that snapshots lie in, by the product's own code, beside a plain pinned
copy; and how much longer a step takes when each one is saved. On CPU the same code copies between two places in
memory."""

from __future__ import annotations

import importlib.util
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lane import Lane
from machine import how_to_bring, missing_wheels
from results import Figure, Figures, NotRunError

from hyperpod_ext.runtime.checkpoint.staging import Background, Stager
from hyperpod_ext.runtime.snapshot.fast_copy import copy_to_gpu_checked

_ROUNDS = 5
_PACE = 12e9
"""Bytes a second of a copy that is to leave room for other traffic."""


@dataclass(frozen=True)
class _Sizes:
    large: tuple[int, int]
    """Number of tensors, and MiB of each."""
    small: tuple[int, int]
    """The same with KiB."""
    saved: tuple[int, int]
    """Of the state that is saved at every step; MiB."""
    width: int
    step_s: float
    steps: int


_SIZES = {
    "cuda": _Sizes((64, 64), (4096, 128), (32, 32), 8192, 0.3, 10),
    "cpu": _Sizes((4, 4), (64, 32), (4, 1), 128, 0.01, 3),
}


def run(lane: Lane) -> Figures:
    torch.set_num_threads(1)  # as in a worker
    if importlib.util.find_spec("awscrt") is None:
        raise NotRunError(f"no awscrt, which takes checksums; bring wheels: {how_to_bring(missing_wheels())}")
    sizes = _SIZES[lane.device]
    nbytes = sizes.large[0] * sizes.large[1] << 20
    figures, floors = _floors(lane, nbytes // 4)
    memory, stager = mmap.mmap(-1, nbytes), Stager()
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)  # a memory server has touched its pages
    figures |= _from_pageable(lane, _tensors(lane, sizes.large[0], sizes.large[1] << 20), memory)
    began = time.perf_counter()
    stager.register(memory, nbytes)
    figures["pin"] = Figure((time.perf_counter() - began) / (nbytes / 2**30), "s/GiB")
    kinds = {"large": (sizes.large[0], sizes.large[1] << 20), "small": (sizes.small[0], sizes.small[1] << 10)}
    for name, (number, each) in kinds.items():
        tensors = _tensors(lane, number, each)
        figures |= _copied(f"{name} tensors", lane, tensors, memory, stager, floors)
        del tensors
    return figures | _stalls(lane, sizes)


def _tensors(lane: Lane, number: int, nbytes: int) -> list[torch.Tensor]:
    return [torch.full((nbytes,), index % 251, dtype=torch.uint8, device=lane.device) for index in range(number)]


def _from_pageable(lane: Lane, tensors: Sequence[torch.Tensor], memory: mmap.mmap) -> Figures:
    nbytes = sum(tensor.numel() for tensor in tensors)
    seconds = _seconds(lane, lambda: _restore_checked(tensors, _places(memory, tensors), memory))
    return {"restore with checksums from memory that is not pinned": Figure(nbytes / seconds / 1e9, "GB/s")}


def _synchronize(lane: Lane) -> None:
    if not lane.fake:
        torch.cuda.synchronize()


def _seconds(lane: Lane, call: Callable[[], object]) -> float:
    """Median, after one that is not counted."""
    took = []
    for _ in range(_ROUNDS + 1):
        _synchronize(lane)
        began = time.perf_counter()
        call()
        _synchronize(lane)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def _floors(lane: Lane, nbytes: int) -> tuple[Figures, tuple[float, float]]:
    """Plain copies of one tensor, off the device and onto it, in bytes a second."""
    there = torch.ones(nbytes, dtype=torch.uint8, device=lane.device)
    here = torch.ones(nbytes, dtype=torch.uint8, pin_memory=not lane.fake)
    off = nbytes / _seconds(lane, lambda: here.copy_(there, non_blocking=True))
    onto = nbytes / _seconds(lane, lambda: there.copy_(here, non_blocking=True))
    figures = {
        "floor, pinned copy off the GPU": Figure(off / 1e9, "GB/s"),
        "floor, pinned copy onto it": Figure(onto / 1e9, "GB/s"),
    }
    return figures, (off, onto)


def _copied(
    name: str,
    lane: Lane,
    tensors: Sequence[torch.Tensor],
    memory: mmap.mmap,
    stager: Stager,
    floors: tuple[float, float],
) -> Figures:
    """The product's copies, into the mapping that it pinned, and back with checksums."""
    places = _places(memory, tensors)
    nbytes = sum(tensor.numel() for tensor in tensors)
    off = nbytes / _seconds(lane, lambda: stager.copy(tensors, places))
    for tensor in tensors:
        tensor.zero_()
    onto = nbytes / _seconds(lane, lambda: _restore_checked(tensors, places, memory))
    right = all(bool((tensor == index % 251).all()) for index, tensor in enumerate(tensors))
    assert right, "bytes came back wrong"
    return {
        f"{name}: copy off": Figure(off / 1e9, "GB/s"),
        f"{name}: copy off, compared with the floor (wanted: 0.9)": Figure(off / floors[0]),
        f"{name}: restore with checksums": Figure(onto / 1e9, "GB/s"),
        f"{name}: restore with checksums, compared with the floor": Figure(onto / floors[1]),
    }


def _places(memory: mmap.mmap, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that lie in the mapping, one after the other."""
    places, offset = [], 0
    for tensor in tensors:
        places.append(torch.frombuffer(memory, dtype=torch.uint8, count=tensor.numel(), offset=offset))
        offset += tensor.numel()
    return places


def _restore_checked(tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor], memory: mmap.mmap) -> None:
    nbytes = sum(place.numel() for place in places)
    copy_to_gpu_checked(tensors, places, memoryview(memory)[:nbytes])


def _stalls(lane: Lane, sizes: _Sizes) -> Figures:
    """Steps with and without a save of each."""
    loop = _Loop(lane, sizes)
    plain_s = loop.seconds(None)
    saved_s = loop.seconds(lambda: loop.stager.copy(loop.state, loop.places))
    paced_s = loop.seconds(loop.copy_paced)
    mib = sizes.saved[0] * sizes.saved[1]
    return {
        "step without a save": Figure(plain_s * 1e3, "ms"),
        f"save of {mib} MiB at each step: step longer by (wanted: 2 % at most)": _percent(saved_s, plain_s),
        f"the same, paced to {_PACE / 1e9:g} GB/s": _percent(paced_s, plain_s),
    }


def _percent(seconds: float, plain_s: float) -> Figure:
    return Figure((seconds / plain_s - 1) * 100, "%")


class _Loop:
    """Matrix products for the time of a step, then a change of the state, which waits for the copy before it."""

    def __init__(self, lane: Lane, sizes: _Sizes) -> None:
        self._lane, self._steps = lane, sizes.steps
        self._a = torch.ones(sizes.width, sizes.width, dtype=torch.bfloat16, device=lane.device)
        self._product = torch.empty_like(self._a)
        self.state = _tensors(lane, sizes.saved[0], sizes.saved[1] << 20)
        memory = mmap.mmap(-1, sum(tensor.numel() for tensor in self.state))
        self.stager, self._background = Stager(), Background("copies")
        self.stager.register(memory, len(memory))
        self.places = _places(memory, self.state)
        once_s = _seconds(lane, lambda: self._multiply(10)) / 10
        self._products = max(1, round(sizes.step_s / once_s))

    def seconds(self, save: Callable[[], None] | None) -> float:
        """Of a step, with this copy at the end of each."""
        _synchronize(self._lane)
        began = time.perf_counter()
        for _ in range(self._steps):
            self._multiply(self._products)
            self._background.wait()
            for tensor in self.state:
                tensor.add_(1)
            if save is not None:
                self.stager.follow()
                self._background.do(save)
        self._background.wait()
        _synchronize(self._lane)
        return (time.perf_counter() - began) / self._steps

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._a, self._a, out=self._product)

    def copy_paced(self) -> None:
        began, done = time.perf_counter(), 0
        for tensor, place in zip(self.state, self.places, strict=True):
            self.stager.copy([tensor], [place])
            done += tensor.numel()
            time.sleep(max(0.0, done / _PACE - (time.perf_counter() - began)))
