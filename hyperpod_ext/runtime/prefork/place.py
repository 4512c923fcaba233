"""The socket and the messages between a launcher's fork server and its clients. This module uses only the standard
library.

The socket is in a directory that other users cannot access. Messages are JSON of a limited size. Server and clients
check that their peer is a process of the same user.
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
"""Same name as in `runtime/ipc/environment.py`, which is not imported here, because it imports too many modules."""
ENV_LAUNCHER = "HPX_PREFORK_LAUNCHER"
"""Process id of the launcher, set in forked ranks, because the launcher is not among their ancestors."""
MOST = 16 << 20
"""Maximum number of bytes in a message, far more than the environment variables in an order need."""


def socket_of(launcher: int) -> str:
    """Return the path of the fork server's socket for the workers of process `launcher`. Makes the socket's directory.

    Raises:
        PermissionError: other users can access the directory.
    """
    directory = os.environ.get(ENV_DIRECTORY) or os.path.join(  # noqa: PTH118  (pathlib would be one more import)
        os.environ.get("TMPDIR") or "/tmp",
        f"hyperpod_ext-{os.getuid()}",
    )
    os.makedirs(directory, mode=0o700, exist_ok=True)  # noqa: PTH103
    known = os.lstat(directory)
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid() or known.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone")
    return socket_in(directory, launcher)


def socket_in(directory: str, launcher: int) -> str:
    """Return the path of the socket in `directory`. The name also depends on the container, because several containers
    may share the directory and have equal process ids."""
    container = f"{os.uname().nodename} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    return f"{directory}/prefork-{zlib.crc32(container.encode()):08x}-{launcher}.socket"


def connect(path: str) -> socket.socket | None:
    """Connect to the server at `path`; None if no process listens there."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        line.close()
        return None
    return line


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a socket's lock inside the `with` block. The kernel releases the lock if the process dies."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def peer_of(line: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the process at the other end of a connection, as the kernel reports them."""
    pid, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def send(line: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    line.sendall(len(body).to_bytes(4, "big") + body)


def receive(line: socket.socket) -> dict[str, Any]:
    """Receive the next message.

    Raises:
        ConnectionError: the peer has closed the connection.
        ValueError: the message is invalid.
    """
    return parse(exactly(line, length_of(exactly(line, 4))))


def length_of(head: bytes) -> int:
    """Return the length of a message in bytes, from the four bytes before the message.

    Raises:
        ValueError: the length is above `MOST`.
    """
    if (length := int.from_bytes(head, "big")) > MOST:
        raise ValueError(f"a message of {length} bytes, more than the limit of {MOST}")
    return length


def parse(body: bytes) -> dict[str, Any]:
    """Parse the bytes of a message.

    Raises:
        ValueError: the bytes are not a message.
    """
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"{type(message).__name__} instead of a message")
    return message


def exactly(line: socket.socket, count: int) -> bytes:
    """Receive `count` bytes.

    Raises:
        ConnectionError: the peer has closed the connection.
    """
    found = bytearray()
    while len(found) < count:
        if not (part := line.recv(count - len(found))):
            raise ConnectionResetError("the peer has closed the connection")
        found += part
    return bytes(found)
