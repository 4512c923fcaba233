"""The socket and the messages of a launcher's fork server, for both ends. Uses only the standard library.

The socket is in a directory that other users cannot access. Messages are JSON of a bounded size, and come from a
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
"""Copy of the name in `runtime/ipc/environment.py`, because that module imports too many others."""
ENV_LAUNCHER = "HPX_PREFORK_LAUNCHER"
"""Process id of the launcher, in processes from the fork server. The launcher is not among their ancestors."""
MOST = 16 << 20
"""Maximum number of bytes in a message. Environments are far smaller."""


def socket_of(launcher: int) -> str:
    """Return the path of the socket for the workers of process `launcher`, and make the socket's directory.

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
    """Return the path of the socket in `directory`. Several containers may share the directory, with equal process
    ids."""
    container = f"{os.uname().nodename} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    return f"{directory}/prefork-{zlib.crc32(container.encode()):08x}-{launcher}.socket"


def connect(path: str) -> socket.socket | None:
    """Connect to the server at `path`. Returns None if no process listens."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        line.close()
        return None
    return line


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock of a socket inside the `with` block. The kernel releases the lock at the latest when the process
    ends."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def peer_of(line: socket.socket) -> tuple[int, int]:
    """Return the process id and user id of the peer, as the kernel reports them."""
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
    """Return the number of bytes in a message, from its head of four bytes.

    Raises:
        ValueError: the number is above `MOST`.
    """
    if (length := int.from_bytes(head, "big")) > MOST:
        raise ValueError(f"a message of {length} bytes, more than {MOST}")
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
            raise ConnectionResetError("the other end of the line has ended")
        found += part
    return bytes(found)
