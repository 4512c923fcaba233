"""How far a device has come that works behind the loop that fills its queue, as a GPU does.

The loop is ahead: what it has called is queued, and not done. When a collective is aborted, what is queued behind it
runs all the same, on garbage, and no exception tells so. A step is therefore committed when a marker that was queued
behind it is reached before the first abort. Why that is right stands in docs/gpu.md.

Hears from the loop which steps it has queued, and from what aborts process groups that it is about to. Says which
steps are done, and whether an optimizer may go on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch


class Marker(Protocol):
    """A place in a device's queue."""

    def query(self) -> bool:
        """Whether it has been reached."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Device(Protocol):
    """What works behind the loop."""

    def record(self) -> Marker:
        """A marker behind everything that has been queued."""


class CudaMarker:
    """An event on the current stream of the current GPU."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def query(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError:  # the GPU has failed: the loop will hear of it, and nothing more is done there
            return False

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """A GPU."""

    def record(self) -> Marker:
        return CudaMarker()


DEVICES: dict[str, Callable[[], Device]] = {"cuda": CudaDevice}
"""What works behind the loop, by torch's name for the kind of device. A CPU does what it is told at once."""


def device_of(tensors: Iterable[torch.Tensor]) -> Device | None:
    """What changes these tensors behind the loop; None: nothing does."""
    kinds = {tensor.device.type for tensor in tensors}
    return next((DEVICES[kind]() for kind in sorted(kinds) if kind in DEVICES), None)


class DeviceSteps:
    """Steps of one generation, as the device makes them. Several threads may use it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: Device | None = None
        self._queued: deque[tuple[int, Marker]] = deque()
        self._newest = 0
        """Newest step that is queued."""
        self._finished = 0
        self._frozen = False

    @property
    def device(self) -> Device | None:
        """None: what the loop has called is done."""
        return self._device

    def enter(self) -> None:
        """A generation begins."""
        with self._lock:
            self._frozen = False
            self._queued.clear()

    def follow(self, device: Device | None, step: int) -> None:
        """The state is that of `step`, and changed by `device` from here on; nothing is queued."""
        with self._lock:
            self._device = device
            self._newest = self._finished = step

    def may_change(self) -> bool:
        """Whether an optimizer may queue a change of the state: not behind what was aborted."""
        with self._lock:
            return self._device is None or not self._frozen

    def queue(self, step: int) -> None:
        """All of `step` has been called."""
        with self._lock:
            self._newest = step
            if self._device is None:
                self._finished = step
            elif not self._frozen:  # one that comes too late is not done: nobody can tell what it stands behind
                self._queued.append((step, self._device.record()))

    def freeze(self) -> None:
        """The first collective of this generation is about to be aborted: what is not done by now is not done."""
        with self._lock:
            self._look()
            self._frozen = True

    def finished(self) -> int:
        """Newest step that is done."""
        with self._lock:
            self._look()
            return self._finished

    def is_good(self, step: int) -> bool:
        """Whether what is read of `step` once its marker is reached is that step: no abort has come before."""
        with self._lock:
            self._look()
            return not self._frozen or step <= self._finished

    def wait(self) -> bool:
        """Wait until all that was queued is done. False: some of it was aborted."""
        if self._device is not None:
            self._device.record().synchronize()
        return self.is_good(self._newest)

    def _look(self) -> None:
        while self._queued and not self._frozen and self._queued[0][1].query():
            self._finished = self._queued.popleft()[0]
