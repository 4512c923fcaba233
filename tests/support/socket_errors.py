"""Errors of the kernel and of TLS at a chosen read or write of this process's sockets.

Every way from our code to a socket is patched: blocking sockets, asyncio's transports, which call the same methods, TLS
sockets, and asyncio's TLS objects. Socket pairs without a name are left alone: asyncio wakes itself by them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_TLS = (ssl.SSLZeroReturnError, ssl.SSLEOFError, ssl.SSLSyscallError, ssl.SSLCertVerificationError, ssl.SSLError)
_READS, _WRITES = ("recv", "recv_into", "recvmsg", "recvmsg_into"), ("send", "sendall", "sendmsg")


def kinds(*, encrypted: bool) -> list[Callable[[], OSError]]:
    """One maker of each error: of every number that the kernel has, and of every class of TLS."""
    found: list[Callable[[], OSError]] = [
        (lambda code=code: OSError(code, os.strerror(code))) for code in sorted(errno.errorcode)
    ]
    if encrypted:
        found += [
            (lambda kind=kind: kind(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] bad record mac")) for kind in _TLS
        ]
    return found


class Injector:
    """Raises at the n-th read or write from when it is armed; thread-safe."""

    def __init__(self, seed: int, *, encrypted: bool) -> None:
        self.rng, self._kinds = random.Random(seed), kinds(encrypted=encrypted)
        self._lock, self._left, self._error = threading.Lock(), 0, OSError()
        self.struck = 0

    def arm(self, within: int) -> str:
        """Have one of the next `within` reads and writes raise; returns what."""
        with self._lock:
            # each kind as often as any other, however many injections there are
            self._error = self._kinds[self.struck % len(self._kinds)]()
            self._left = self.rng.randrange(within) + 1
        return repr(self._error)

    @property
    def is_armed(self) -> bool:
        return self._left > 0

    def disarm(self) -> None:
        with self._lock:
            self._left = 0

    def __call__(self, sock: Any) -> None:
        if not self._left or not _is_ours(sock):
            return
        with self._lock:
            if not self._left:
                return
            self._left -= 1
            if self._left:
                return
            self.struck += 1
        raise self._error


def _is_ours(sock: Any) -> bool:
    if not isinstance(sock, socket.socket):
        return True  # a TLS object of asyncio
    try:
        return sock.family != socket.AF_UNIX or bool(sock.getsockname() or sock.getpeername())
    except OSError:
        return False


@contextlib.contextmanager
def injected(seed: int, *, encrypted: bool = False) -> Iterator[Injector]:
    """An injector at work; it is armed by the caller."""
    injector = Injector(seed, encrypted=encrypted)
    with contextlib.ExitStack() as stack:

        def patch(kind: type[Any], name: str) -> None:
            real = getattr(kind, name)

            def raising(self: Any, *args: Any, **named: Any) -> Any:
                injector(self)
                return real(self, *args, **named)

            stack.enter_context(mock.patch.object(kind, name, raising))

        for name in (*_READS, *_WRITES):
            patch(socket.socket, name)
        for name in ("recv", "recv_into", "send", "sendall"):
            patch(ssl.SSLSocket, name)
        for name in ("read", "write"):
            patch(ssl.SSLObject, name)
        real_fds = socket.recv_fds
        stack.enter_context(mock.patch.object(socket, "recv_fds", lambda sock, *args: real_fds(sock, *args)))
        yield injector
