"""Progress of an asynchronous device, such as a GPU, behind the loop that fills its queue.

The loop is ahead: its calls are queued, and not done. When a collective is aborted, the work queued behind it still
runs, on invalid data and without an exception. A step is therefore committed when a marker queued behind it is reached
before the first abort; docs/gpu.md explains why.

The loop reports the steps it queues, and the abort reports its start. The result: which steps are done, and whether an
optimizer may continue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch


class Marker(Protocol):
    """A position in a device's queue."""

    def query(self) -> bool:
        """Return whether the device has reached the marker."""

    def synchronize(self) -> None:
        """Wait until the device has reached the marker."""


class Device(Protocol):
    """An asynchronous device."""

    def record(self) -> Marker:
        """Queue a marker behind all queued work."""


class CudaMarker:
    """An event on the current stream of the current GPU."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def query(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError:  # the GPU has failed: the loop will get the error, and nothing more is done
            return False

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """A GPU."""

    def record(self) -> Marker:
        return CudaMarker()


DEVICES: dict[str, Callable[[], Device]] = {"cuda": CudaDevice}
"""Asynchronous devices by torch's device type. A CPU works synchronously."""


def device_of(tensors: Iterable[torch.Tensor]) -> Device | None:
    """Return the device that changes these tensors asynchronously; None: none does."""
    kinds = {tensor.device.type for tensor in tensors}
    return next((DEVICES[kind]() for kind in sorted(kinds) if kind in DEVICES), None)


class DeviceSteps:
    """Steps of one generation that the device has made. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: Device | None = None
        self._queued: deque[tuple[int, Marker]] = deque()
        self._newest = 0
        """Newest queued step."""
        self._finished = 0
        self._frozen = False

    @property
    def device(self) -> Device | None:
        """The asynchronous device; None: all calls are done when they return."""
        return self._device

    def enter(self) -> None:
        """Begin a generation."""
        with self._lock:
            self._frozen = False
            self._queued.clear()

    def follow(self, device: Device | None, step: int) -> None:
        """Start from the state of `step`, which `device` changes from now on; nothing is queued."""
        with self._lock:
            self._device = device
            self._newest = self._finished = step

    def may_change(self) -> bool:
        """Return whether an optimizer may queue a change of the state: not after an abort."""
        with self._lock:
            return self._device is None or not self._frozen

    def queue(self, step: int) -> None:
        """Record that the loop has queued all of `step`."""
        with self._lock:
            self._newest = step
            if self._device is None:
                self._finished = step
            elif not self._frozen:  # a later marker proves nothing: it may be behind the abort
                self._queued.append((step, self._device.record()))

    def freeze(self) -> None:
        """Freeze the result before the first abort of a collective: unfinished steps count as not done."""
        with self._lock:
            self._look()
            self._frozen = True

    def finished(self) -> int:
        """Return the newest finished step."""
        with self._lock:
            self._look()
            return self._finished

    def is_good(self, step: int) -> bool:
        """Return whether a state read after the step's marker is valid: no abort came before."""
        with self._lock:
            self._look()
            return not self._frozen or step <= self._finished

    def wait(self) -> bool:
        """Wait until all queued work is done; return False if some of it was aborted."""
        if self._device is not None:
            self._device.record().synchronize()
        return self.is_good(self._newest)

    def _look(self) -> None:
        while self._queued and not self._frozen and self._queued[0][1].query():
            self._finished = self._queued.popleft()[0]
