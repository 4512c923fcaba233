"""Ends a memory server that no agent started, once the server has no connections and no running copies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hyperpod_ext.runtime.memory_server.client.start import locked

_TICK_S = 1.0


class IdleExit:
    """Counts the server's open connections, and ends the server when it is idle. A connection is counted while its
    thread is inside a `with` statement on this object. Thread-safe.

    Args:
        socket: the server's socket, which is removed when the server ends.
        lock: lock file, held while a process starts, finds or ends a server.
        after_s: seconds without a connection after which the server ends.
    """

    def __init__(self, socket: Path, lock: Path, after_s: float) -> None:
        self._socket, self._lock, self._after_s = socket, lock, after_s
        self._connections, self._alone_since = 0, time.monotonic()
        self._counting = threading.Lock()
        self._copied: Callable[[], bool] = lambda: True

    def start(self, copied: Callable[[], bool]) -> None:
        """Start to watch the server, and end this process once the server is idle. `copied` returns whether all due
        copies are done."""
        self._copied = copied
        threading.Thread(target=self._end_when_idle, name="end when idle", daemon=True).start()

    def hasten(self) -> None:
        """End the memory server as soon as it has no connection."""
        self._after_s = 0.0

    def __enter__(self) -> None:
        with self._counting:
            self._connections += 1

    def __exit__(self, *_: object) -> None:
        with self._counting:
            self._connections -= 1
            self._alone_since = time.monotonic()

    def _end_when_idle(self) -> None:
        while True:
            time.sleep(min(_TICK_S, max(self._after_s / 4, 0.05)))
            if not self._idle():
                continue
            try:
                # a process holds this lock while it starts a server or connects to a running one
                with locked(self._lock):
                    if self._idle():
                        self._socket.unlink(missing_ok=True)
                        os._exit(0)
            except FileNotFoundError:  # the socket's folder was deleted: no process can connect to this server
                os._exit(0)

    def _idle(self) -> bool:
        with self._counting:
            if self._connections or time.monotonic() - self._alone_since < self._after_s:
                return False
        return self._copied()
