"""State of one running transfer: deadline, cancel and progress callbacks, request body."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from hyperpod_ext.runtime.storage.object_store import MIB, Cancelled, ignore, never

PIECE = MIB  # one send and one check of `cancelled`; http.client's own 16 KiB cost four times the CPU


class Call:
    """Deadline, cancellation and progress of one call. Shared by its streams."""

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
        """The call ended at its deadline, so a later try may succeed."""
        self._cancelled = cancelled
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._last_progress = time.monotonic()

    def look(self) -> None:
        """Raise `Cancelled` if the caller cancelled, or another stream has failed."""
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
        """Do all of `items`; raise the first failure after every stream has stopped using the caller's memory."""
        if len(items) == 1:
            work(items[0])
        elif items:
            with ThreadPoolExecutor(min(streams, len(items)), "s3") as pool:
                try:
                    wait_for([pool.submit(self._guarded, work, item) for item in items])
                except BaseException as error:  # Ctrl-C
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
    """A request body of views of the caller's memory, so that the socket sends without copies."""

    def __init__(self, data: memoryview, call: Call) -> None:
        self._data = data
        self._call = call
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        """Return the next piece of `PIECE` bytes. `size` is ignored: http.client sends pieces of any length."""
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
            self._call.count(position - self._position)  # will be sent again
        self._position = position
        return position
