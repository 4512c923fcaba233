"""Track which steps an asynchronous device, such as a GPU, has finished, while the training loop queues further steps.

The training loop runs ahead of the device, which has not yet done all queued work. If a collective is aborted, the
device still runs the work queued behind the collective, on invalid data and without an exception. Therefore a step is
committed only if the device reaches a marker behind the step's work before the first abort. docs/gpu.md explains why.

The training loop calls `queue` for each step. Code that aborts collectives calls `freeze` before the abort. The methods
`finished` and `is_good` return which steps are valid; `may_change` returns whether an optimizer may step.
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
        except RuntimeError:  # a GPU error; the loop's next GPU call will raise it
            return False

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """A GPU."""

    def record(self) -> Marker:
        return CudaMarker()


DEVICES: dict[str, Callable[[], Device]] = {"cuda": CudaDevice}
"""Asynchronous devices, by torch's name of the device type. The CPU is left out, because it works synchronously."""


def device_of(tensors: Iterable[torch.Tensor]) -> Device | None:
    """Return the asynchronous device of these tensors; None if all tensors are on synchronous devices."""
    kinds = {tensor.device.type for tensor in tensors}
    return next((DEVICES[kind]() for kind in sorted(kinds) if kind in DEVICES), None)


class DeviceSteps:
    """The steps of one generation that the device has finished. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: Device | None = None
        self._queued: deque[tuple[int, Marker]] = deque()
        self._newest = 0
        """Number of the newest queued step."""
        self._finished = 0
        self._frozen = False

    @property
    def device(self) -> Device | None:
        """The asynchronous device; None if the device is synchronous, so that work is done when a call returns."""
        return self._device

    def enter(self) -> None:
        """Begin a generation."""
        with self._lock:
            self._frozen = False
            self._queued.clear()

    def follow(self, device: Device | None, step: int) -> None:
        """Track the steps of `device` from now on. At present, `step` is the newest finished step."""
        with self._lock:
            self._device = device
            self._newest = self._finished = step

    def may_change(self) -> bool:
        """Return whether an optimizer may queue a change of the state; False after an abort."""
        with self._lock:
            return self._device is None or not self._frozen

    def queue(self, step: int) -> None:
        """Record that the loop has queued all work of `step`."""
        with self._lock:
            self._newest = step
            if self._device is None:
                self._finished = step
            elif not self._frozen:  # after `freeze`, no marker proves valid work
                self._queued.append((step, self._device.record()))

    def freeze(self) -> None:
        """Count no more steps as finished, because after the following abort the device may run steps on invalid data.

        Call this before the first abort of a collective.
        """
        with self._lock:
            self._look()
            self._frozen = True

    def finished(self) -> int:
        """Return the newest finished step."""
        with self._lock:
            self._look()
            return self._finished

    def is_good(self, step: int) -> bool:
        """Return whether state that was read behind the marker of `step` is valid: no abort came before the marker."""
        with self._lock:
            self._look()
            return not self._frozen or step <= self._finished

    def wait(self) -> bool:
        """Wait until all queued work is done. Return False if a part of the work was aborted."""
        if self._device is not None:
            self._device.record().synchronize()
        return self.is_good(self._newest)

    def _look(self) -> None:
        while self._queued and not self._frozen and self._queued[0][1].query():
            self._finished = self._queued.popleft()[0]
