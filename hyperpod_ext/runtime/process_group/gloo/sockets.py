"""Finds gloo's open sockets in the epoll sets of gloo's event threads.

The module searches for the sockets only when a caller needs them, because a group may open a connection as late as the
connection's first use.
The epoll set of a group's event thread always contains exactly the sockets in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import stat
import struct
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from hyperpod_ext.ports import family_of

_EPOLL_CTL_MOD = 3
_READ_BYTES = 1 << 16
_ANY_FD = 2
_INT_BYTES = 4
_libc = ctypes.CDLL(None, use_errno=True)
_quick_libc = ctypes.PyDLL(None)
"""libc for calls that keep the GIL, because they take less time than releasing it."""


class _Event(ctypes.Structure):
    """The C struct `epoll_event`."""

    _pack_ = 1 if os.uname().machine == "x86_64" else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


@dataclass(frozen=True, slots=True)
class Connection:
    """A socket that is registered in a group's epoll set. The socket is connected or connecting."""

    fd: int
    """The descriptor number when the socket was registered. The number may belong to another file by now, because an
    epoll set keeps a closed socket that has a duplicate or is open in a forked process."""
    events: int
    data: int
    """Pointer to gloo's object that handles events on the socket."""
    inode: int

    @property
    def armed(self) -> bool:
        """Whether gloo is waiting for events on the socket."""
        return bool(self.events & (select.EPOLLIN | select.EPOLLOUT))


@dataclass(frozen=True, slots=True)
class EventLoop:
    """The sockets of one gloo group: the epoll set of the group's event thread, and the sockets registered in it."""

    epoll: int
    connections: dict[int, Connection]
    """Registered sockets except the listening socket, by inode."""
    address: tuple[str, int]
    """Address of the group's listening socket."""


def next_descriptor() -> int:
    """Return the descriptor number of the next opened file: the lowest free number."""
    number = os.dup(_ANY_FD)
    os.close(number)
    return number


def event_loops(known: Container[int] = ()) -> list[EventLoop]:
    """Return the event loop of every gloo group in this process: an epoll set with a pipe and a listening socket.

    The result includes groups of the parent process, because a forked process inherits epoll sets.

    Args:
        known: inodes of known connections, which are not checked again.
    """
    numbers = os.listdir("/proc/self/fd")  # noqa: PTH208  (names suffice; Path objects would be slow)
    return list(event_loops_among(map(int, numbers), known))


def event_loops_among(numbers: Iterable[int], known: Container[int] = ()) -> Iterator[EventLoop]:
    """Yield the event loops whose epoll sets are among the descriptors `numbers`."""
    for number in numbers:
        try:
            if stat.S_IFMT(os.fstat(number).st_mode):
                continue  # skip: only epoll sets have no file type
            loop = _read(number, known)
        except OSError:  # the descriptor is not an epoll set, or was just closed
            continue
        if loop is not None:
            yield loop


def read_proc(path: str) -> str:
    """Read a file in /proc. Takes a third of the time that Python's file objects need.

    Raises:
        OSError: the file's process, thread or descriptor no longer exists.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while more := os.read(fd, _READ_BYTES):
            data += more
    finally:
        os.close(fd)
    return data.decode(errors="replace")


def _read(epoll: int, known: Container[int]) -> EventLoop | None:
    """Return the event loop of an epoll set; None if descriptor `epoll` is not an epoll set of gloo."""
    pipes = 0
    listeners: list[tuple[str, int]] = []
    connections: dict[int, Connection] = {}
    for registered in _registered(read_proc(f"/proc/self/fdinfo/{epoll}")):
        with contextlib.suppress(OSError):  # the descriptor was just closed
            status = os.fstat(registered.fd)
            if status.st_ino != registered.inode:
                continue  # the descriptor number belongs to another file by now
            if stat.S_ISFIFO(status.st_mode):
                pipes += 1
            elif stat.S_ISSOCK(status.st_mode):
                if registered.inode not in known and (address := _listens_at(registered.fd)) is not None:
                    listeners.append(address)
                else:
                    connections[registered.inode] = registered
    return EventLoop(epoll, connections, listeners[0]) if pipes == len(listeners) == 1 else None


def _registered(fdinfo: str) -> list[Connection]:
    """Parse the entries of an epoll set, from lines like `tfd: 29 events: 19 data: 7f12ac0  pos:0 ino:3d sdev:9`."""
    found = []
    for line in fdinfo.splitlines():
        if line.startswith("tfd:"):
            words = line.split()
            fd, events, data = int(words[1]), int(words[3], 16), int(words[5], 16)
            if data & 0xFFFFFFFF != fd:  # gloo stores a pointer in `data`, Python and libuv a descriptor
                found.append(Connection(fd, events, data, int(words[7].removeprefix("ino:"), 16)))
    return found


def quieten(loop: EventLoop) -> None:
    """Allow each socket on which gloo waits only one more event, so that the group can be destroyed.

    If gloo has no buffer for a message, it never reads the message or the end of the connection. The group's event
    thread would spin for this reason, and destroying the group would wait for the event thread forever.

    Sockets on which gloo waits for a single event are not changed, because gloo deletes their handler after the event.
    """
    for connection in loop.connections.values():
        if connection.armed and not connection.events & select.EPOLLONESHOT:
            event = _Event(select.EPOLLONESHOT, connection.data)
            # fails if the socket was just closed, which does not matter
            _libc.epoll_ctl(loop.epoll, _EPOLL_CTL_MOD, connection.fd, ctypes.byref(event))


def _listens_at(fd: int) -> tuple[str, int] | None:
    """Return the address at which a socket listens; None if the socket does not listen."""
    listens, size = ctypes.c_int(), ctypes.c_uint(_INT_BYTES)
    wanted = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    failed = _quick_libc.getsockopt(fd, *wanted, ctypes.byref(listens), ctypes.byref(size))
    if failed or not listens.value:
        return None
    with socket.socket(fileno=os.dup(fd)) as copy:
        address = copy.getsockname()
        return str(address[0]), int(address[1])


def answer_for(loop: EventLoop, places: int) -> None:
    """Connect to the group of `loop` as each other member would connect, and close the connections again.

    A thread of this process that waits for a member's connection gets the closed connection, and raises. Later
    connections of the same member are ignored by gloo. A member sends its index in the group (eight bytes).
    """
    family = family_of(loop.address[0])
    for place in range(places):
        # after an error, no thread waits any more, because the group is being destroyed
        with contextlib.suppress(OSError), socket.socket(family) as connection:
            connection.settimeout(1.0)
            connection.connect(loop.address)
            connection.sendall(struct.pack("q", place))


def duplicate(fd: int, inode: int) -> int | None:
    """Return a duplicate of descriptor `fd`. Returns None if `fd` no longer belongs to the socket with this inode."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None  # the connection was just closed
    if os.fstat(copy).st_ino == inode:
        return copy
    os.close(copy)
    return None


def end_reading(fd: int) -> None:
    """Shut down a socket for reading, so that readers get end-of-file. Has no effect on an unconnected socket."""
    _quick_libc.shutdown(fd, socket.SHUT_RD)
