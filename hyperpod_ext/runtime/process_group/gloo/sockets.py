"""The sockets that gloo has open, found where gloo itself keeps them: in the epoll sets of its event threads.

With connections that are made when they are first used, there is no moment at which a group has all of its
sockets. What is registered with a group's event thread is exactly what the group uses, now.
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
"""Keeps the GIL: for calls that take less time than to let go of it."""


class _Event(ctypes.Structure):
    """`struct epoll_event`."""

    _pack_ = 1 if os.uname().machine == "x86_64" else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


@dataclass(frozen=True, slots=True)
class Connection:
    """One of a group's sockets, as it is registered; those that are being made included."""

    fd: int
    """The number it was registered under. An epoll set keeps a socket that lives on elsewhere (a duplicate, a forked
    process) when this number has long become something else's."""
    events: int
    data: int
    """A pointer to whatever of gloo's takes the events."""
    inode: int

    @property
    def armed(self) -> bool:
        """Whether gloo waits for something on it."""
        return bool(self.events & (select.EPOLLIN | select.EPOLLOUT))


@dataclass(frozen=True, slots=True)
class EventLoop:
    """One group's event thread, as the kernel sees it."""

    epoll: int
    connections: dict[int, Connection]
    """By inode."""
    address: tuple[str, int]
    """Where it listens."""


def next_descriptor() -> int:
    """The number of whatever this process opens next: the kernel gives the lowest that is free."""
    number = os.dup(_ANY_FD)
    os.close(number)
    return number


def event_loops(known: Container[int] = ()) -> list[EventLoop]:
    """Of every gloo group in this process: an epoll set that holds a pipe and one listening socket.

    Groups of a process that this one was forked from are among them: an epoll set is inherited.

    Args:
        known: inodes of connections that were found before, which saves looking at them.
    """
    numbers = os.listdir("/proc/self/fd")  # noqa: PTH208  (names only, no Path objects on this path)
    return list(event_loops_among(map(int, numbers), known))


def event_loops_among(numbers: Iterable[int], known: Container[int] = ()) -> Iterator[EventLoop]:
    """Those with these descriptors, one after the other."""
    for number in numbers:
        try:
            if stat.S_IFMT(os.fstat(number).st_mode):
                continue  # a file, pipe or socket; the kernel's own objects, epoll sets among them, have no type
            loop = _read(number, known)
        except OSError:  # it is none, or was closed a moment ago
            continue
        if loop is not None:
            yield loop


def read_proc(path: str) -> str:
    """A file of the kernel's, in a third of the time that Python's own files take.

    Raises:
        OSError: what it tells of has gone.
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
    """An epoll set's descriptors by kind; None for what is none, or not gloo's."""
    pipes = 0
    listeners: list[tuple[str, int]] = []
    connections: dict[int, Connection] = {}
    for registered in _registered(read_proc(f"/proc/self/fdinfo/{epoll}")):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(registered.fd)
            if status.st_ino != registered.inode:
                continue  # the number is another's by now
            if stat.S_ISFIFO(status.st_mode):
                pipes += 1
            elif stat.S_ISSOCK(status.st_mode):
                if registered.inode not in known and (address := _listens_at(registered.fd)) is not None:
                    listeners.append(address)
                else:
                    connections[registered.inode] = registered
    return EventLoop(epoll, connections, listeners[0]) if pipes == len(listeners) == 1 else None


def _registered(fdinfo: str) -> list[Connection]:
    """What is in an epoll set, from lines like `tfd: 29 events: 19 data: 7f12ac0  pos:0 ino:3d sdev:9`."""
    found = []
    for line in fdinfo.splitlines():
        if line.startswith("tfd:"):
            words = line.split()
            fd, events, data = int(words[1]), int(words[3], 16), int(words[5], 16)
            if data & 0xFFFFFFFF != fd:  # a pointer; Python and libuv put the descriptor there
                found.append(Connection(fd, events, data, int(words[7].removeprefix("ino:"), 16)))
    return found


def quieten(loop: EventLoop) -> None:
    """Have gloo told once more at most of what is still armed.

    A message whose buffer has gone is never read to its end, nor is the end of its connection: the event thread turns
    in circles over it, and whoever destroys the group waits for that thread for ever.

    What is armed for one event only is let be: its pointer is to something that is gone after that event.
    """
    for connection in loop.connections.values():
        if connection.armed and not connection.events & select.EPOLLONESHOT:
            event = _Event(select.EPOLLONESHOT, connection.data)
            _libc.epoll_ctl(loop.epoll, _EPOLL_CTL_MOD, connection.fd, ctypes.byref(event))  # fails if closed by now


def _listens_at(fd: int) -> tuple[str, int] | None:
    """Address of a listening socket."""
    listens, size = ctypes.c_int(), ctypes.c_uint(_INT_BYTES)
    wanted = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    failed = _quick_libc.getsockopt(fd, *wanted, ctypes.byref(listens), ctypes.byref(size))
    if failed or not listens.value:
        return None
    with socket.socket(fileno=os.dup(fd)) as copy:
        address = copy.getsockname()
        return str(address[0]), int(address[1])


def answer_for(loop: EventLoop, places: int) -> None:
    """Connect to a group as each of its other members would, and hang up.

    Whoever waits for a connection that its member will not make any more gets this one, and finds it closed. What
    comes later is put aside. A member says which one it is by its place in the group, in eight bytes.
    """
    family = family_of(loop.address[0])
    for place in range(places):
        with contextlib.suppress(OSError), socket.socket(family) as connection:  # the group is being destroyed
            connection.settimeout(1.0)
            connection.connect(loop.address)
            connection.sendall(struct.pack("q", place))


def duplicate(fd: int, inode: int) -> int | None:
    """Another descriptor of the connection, checked by inode so that a reused number is never hit."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None  # closed meanwhile
    if os.fstat(copy).st_ino == inode:
        return copy
    os.close(copy)
    return None


def end_reading(fd: int) -> None:
    """Whoever reads from the connection finds it ended. Nothing happens to one that is not connected (any more)."""
    _quick_libc.shutdown(fd, socket.SHUT_RD)
