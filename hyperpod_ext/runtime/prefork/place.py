"""Where the fork server of a launcher is reached, and what both of its ends read and write. Standard library alone.

The socket lies in a directory that is closed to other users. What comes over it is JSON, of a bounded size, from a
process of the same user.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import struct
import zlib
from collections.abc import Iterator
from typing import Any

ENV_DIRECTORY = "HPX_SOCKET_DIR"
"""As `runtime/ipc/environment.py` has it, which imports too much for here."""
ENV_LAUNCHER = "HPX_PREFORK_LAUNCHER"
"""In a process from the fork server: the id of its launcher, which is not among its ancestors."""
MOST = 16 << 20
"""Bytes of a message: environments are far smaller."""


def socket_of(launcher: int) -> str:
    """Path of the socket for the workers of the process `launcher`; makes its directory.

    Raises:
        PermissionError: the directory is not this user's alone.
    """
    directory = os.environ.get(ENV_DIRECTORY) or os.path.join(  # noqa: PTH118  (pathlib is an import)
        os.environ.get("TMPDIR") or "/tmp",
        f"hyperpod_ext-{os.getuid()}",
    )
    os.makedirs(directory, mode=0o700, exist_ok=True)  # noqa: PTH103
    known = os.lstat(directory)
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid() or known.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone")
    return socket_in(directory, launcher)


def socket_in(directory: str, launcher: int) -> str:
    """The same, where the directory is known. Containers may share it, and a launcher often has the same id in each."""
    container = f"{os.uname().nodename} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    return f"{directory}/prefork-{zlib.crc32(container.encode()):08x}-{launcher}.socket"


def connect(path: str) -> socket.socket | None:
    """A line to whoever listens there; None: nobody does."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        line.close()
        return None
    return line


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock of a socket; it goes with the process."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def peer_of(line: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def send(line: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    line.sendall(len(body).to_bytes(4, "big") + body)


def receive(line: socket.socket) -> dict[str, Any]:
    """The next message.

    Raises:
        ConnectionError: the other end has ended.
        ValueError: it is no message.
    """
    return parse(exactly(line, length_of(exactly(line, 4))))


def length_of(head: bytes) -> int:
    """Bytes that a message has, from the four before it.

    Raises:
        ValueError: too many.
    """
    if (length := int.from_bytes(head, "big")) > MOST:
        raise ValueError(f"a message of {length} bytes, more than {MOST}")
    return length


def parse(body: bytes) -> dict[str, Any]:
    """A message from its bytes.

    Raises:
        ValueError: it is none.
    """
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"{type(message).__name__} instead of a message")
    return message


def exactly(line: socket.socket, count: int) -> bytes:
    """So many bytes.

    Raises:
        ConnectionError: the other end has ended.
    """
    found = bytearray()
    while len(found) < count:
        if not (part := line.recv(count - len(found))):
            raise ConnectionResetError("the other end of the line has ended")
        found += part
    return bytes(found)
