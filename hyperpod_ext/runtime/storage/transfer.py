"""State of one running transfer to or from S3: deadline, cancellation, progress, and the body of a request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from hyperpod_ext.runtime.storage.object_store import MIB, Cancelled, ignore, never

PIECE = MIB
"""Number of bytes per send and per call of `cancelled`. With http.client's default of 16 KiB, sending takes four times
the CPU time."""


class Call:
    """Deadline, cancellation and progress of one call of a store, shared by all parallel streams of the call.

    Args:
        deadline_s: seconds without progress after which the call stops retrying.
        what: the call's object, for messages.
        cancelled: returns whether the caller has cancelled the call.
        on_bytes: called with the number of bytes sent, or a negative number for bytes that must be sent again.
    """

    def __init__(
        self,
        deadline_s: float,
        what: str,
        cancelled: Callable[[], bool] = never,
        on_bytes: Callable[[int], None] = ignore,
    ) -> None:
        self.deadline_s = deadline_s
        self.what = what
        self.gave_up = False
        """Whether the call failed at its deadline, so that a later call may succeed."""
        self._cancelled = cancelled
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._last_progress = time.monotonic()

    def look(self) -> None:
        """Raise `Cancelled` if the caller has cancelled the call, or another stream of the call has failed."""
        if self._stopped.is_set() or self._cancelled():
            raise Cancelled(self.what)

    def count(self, nbytes: int) -> None:
        with self._lock:
            self._on_bytes(nbytes)

    def progress(self) -> None:
        self._last_progress = time.monotonic()

    def seconds_left(self) -> float:
        return self._last_progress + self.deadline_s - time.monotonic()

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.look()
            self._stopped.wait(min(left, 0.1))

    def in_streams(self, work: Callable[[int], None], items: Sequence[int], streams: int) -> None:
        """Call `work` for all `items`, in up to `streams` threads.

        If a call fails, the first error is raised after every thread has stopped using the caller's memory.
        """
        if len(items) == 1:
            work(items[0])
        elif items:
            with ThreadPoolExecutor(min(streams, len(items)), "s3") as pool:
                try:
                    wait_for([pool.submit(self._guarded, work, item) for item in items])
                except BaseException as error:  # also catch KeyboardInterrupt
                    self._stop(error)
        failure, self._failure = self._failure, None
        self._stopped.clear()
        if failure:
            raise failure

    def _guarded(self, work: Callable[[int], None], item: int) -> None:
        try:
            if not self._stopped.is_set():
                work(item)
        except BaseException as error:
            self._stop(error)

    def _stop(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or failure
        self._stopped.set()


class Body:
    """The body of a request, which returns views of the caller's memory, so that the socket sends without a copy."""

    def __init__(self, data: memoryview, call: Call) -> None:
        self._data = data
        self._call = call
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        """Return the next `PIECE` bytes. `size` is ignored, because http.client sends pieces of any length."""
        self._call.look()
        piece = self._data[self._position : self._position + PIECE]
        self._position += len(piece)
        if piece:
            self._call.count(len(piece))
        return piece

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        position = (0, self._position, len(self._data))[whence] + offset
        if position < self._position:
            self._call.count(position - self._position)  # subtract the bytes that will be sent again
        self._position = position
        return position
