"""Copy live tensors into slots (shared memory for snapshots), in the calling thread or in a background thread."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.snapshot.fast_copy import copy
from hyperpod_ext.runtime.state.device_steps import Device, Marker


class Stager:
    """Copies tensors into slots (shared memory for snapshots). Tensors on a GPU are copied on a separate CUDA stream
    into pinned memory."""

    def __init__(self) -> None:
        self.device: Device | None = None
        """Device that changes the tensors asynchronously; None if all tensors change synchronously."""
        self._after: Marker | None = None
        self._stream: torch.cuda.Stream | None = None
        self._memory: Any = None
        """The mapping with pinned parts, which is kept alive so that no other mapping gets the pinned addresses."""
        self._pinned: set[int] = set()

    def register(self, memory: Any, nbytes: int, start: int = 0) -> None:
        """Pin a part of a mapping, unless it is pinned already.

        Copies from a GPU into pageable memory are several times slower than copies into pinned memory.

        Args:
            memory: the mapping.
            nbytes: number of bytes to pin.
            start: offset of the first byte.
        """
        if not _cuda_in_use():
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start
        with torch.cuda.device(self._side_stream().device):  # without this, a background thread uses GPU 0
            if self._memory is not memory:
                self._let_go()
                self._memory = memory
            if address in self._pinned:
                return
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code != 0:
            raise HyperpodExtError(
                f"{nbytes} bytes of the memory tier cannot be pinned for copies from the GPU: cudaHostRegister "
                f"returned CUDA error {code}"
            )
        self._pinned.add(address)

    def _let_go(self) -> None:
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def copy(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
        """Copy each source to its destination, and return when all copies are complete. The copies run without the
        GIL."""
        on_gpu = any(source.is_cuda for source in sources)
        if not on_gpu:
            self.wait_device()
            for source, destination in zip(sources, destinations, strict=True):
                copy(destination, source)
            return
        stream = self._side_stream()
        with torch.no_grad(), self.after_device():
            for source, destination in zip(sources, destinations, strict=True):
                destination.copy_(source, non_blocking=True)  # the caller keeps `sources` alive
            done = torch.cuda.Event()
            done.record(stream)
        done.synchronize()

    def after_device(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which GPU work runs on the copy stream.

        The copy stream waits for work that was queued before the last call of `follow`, but not for later work.
        """
        return torch.cuda.stream(self._side_stream()) if _cuda_in_use() else contextlib.nullcontext()

    def wait_device(self) -> None:
        """Wait until the device has done the work that was queued when `follow` was called."""
        if self._after is not None:
            self._after.synchronize()

    def follow(self) -> None:
        """Make the next copies wait for the device's work that is queued now."""
        self._after = self.device.record() if self.device is not None else None
        if _cuda_in_use():
            self._side_stream().wait_stream(torch.cuda.current_stream())

    def _side_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())


class Background:
    """One thread that runs one function at a time."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, work: Callable[[], None]) -> None:
        """Start running `work` in the thread.

        Raises:
            RuntimeError: the last function is still running.
        """
        if not self._idle.is_set():
            raise RuntimeError("the background thread is still running the last function: call wait() first")
        self._idle.clear()
        self._work.put(work)

    def wait(self) -> None:
        """Wait until the last function has returned. If the function has raised an error, raise the same error."""
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def idle(self) -> bool:
        return self._idle.is_set()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except Exception as error:  # `wait` raises this error again
                self._error = error
            del work
            self._idle.set()
