"""Finds threads that wait in gloo for an event that will never happen, and ends their waits.

When a connection ends, gloo wakes the operations in its queues, but not an operation in the middle of its transfer. The
thread of an operation in transfer sleeps until the group's timeout, half an hour by default. A thread that waits for a
connection from a dead peer also sleeps until the group's timeout. A waiting thread sleeps on a condition variable
inside a gloo object. The kernel shows the address on which a thread sleeps, and the gloo object around the address is
recognized by its virtual function table. The function `signalException` of gloo, which libtorch exports, makes a wait
for a buffer raise. A wait for a connection is ended by making a connection (`sockets.answer_for`).

This module does not depend on the layout of gloo's objects. If libtorch lacks a needed symbol, `LostWakeups.find()`
returns None.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.runtime.process_group.gloo.sockets import read_proc

_LIST_EVERY = 8
"""Number of checks of gloo's threads after which the threads are listed again."""

_X86 = os.uname().machine == "x86_64"
_FUTEX = 202 if _X86 else 98
_EPOLL_WAITS = {232, 281} if _X86 else {22}
_GLOO = "N4gloo9transport3tcp"
_BUFFER, _PAIR = f"_ZTV{_GLOO}13UnboundBufferE", f"_ZTV{_GLOO}4PairE"
_TELL_BUFFER = f"_Z{_GLOO}13UnboundBuffer15signalExceptionENSt15__exception_ptr13exception_ptrE"
_RUNTIME_ERROR_BYTES = 16
_SYSCALL_BYTES = 256
"""Bytes to read from /proc for a system call: its number, six arguments and two registers."""
_BUFFER_BYTES, _PAIR_BYTES = 256, 1024
"""Maximum offsets in bytes of the condition variable in gloo's buffers and pairs. The offsets in torch 2.13 are 120 and
528."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """A thread that sleeps on a futex until another thread wakes it, or until a timeout."""

    thread: int
    address: int
    """Address of the futex on which the thread sleeps."""
    timed: bool


def sleeping(thread: int) -> Sleep | None:
    """Return the futex on which a thread of this process sleeps; None if the thread is not in a futex wait."""
    try:
        return _sleep(thread, read_proc(f"/proc/self/task/{thread}/syscall"))
    except OSError:  # the thread has just ended
        return None


def ran_s(thread: int) -> float:
    """Return the CPU time that a thread of this process has used, in seconds; infinite if the thread has ended."""
    try:
        return int(read_proc(f"/proc/self/task/{thread}/schedstat").split()[0]) / 1e9
    except OSError:
        return math.inf


def _sleep(thread: int, syscall: str) -> Sleep | None:
    words = syscall.split()
    if len(words) < 5 or words[0] != str(_FUTEX):
        return None
    return Sleep(thread, int(words[1], 16), timed=int(words[4], 16) != 0)


def threads(name: str = "") -> list[int]:
    """Return the ids of this process's threads whose names begin with `name`."""
    found = []
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208  (names suffice; Path objects would be slow)
        with contextlib.suppress(OSError):  # the thread has just ended
            if not name or read_proc(f"/proc/self/task/{task}/comm").startswith(name):
                found.append(int(task))
    return found


def work_threads() -> list[int]:
    """Return the ids of the threads that run gloo's operations.

    In older versions of torch, gloo's threads have no name, so the result has all threads that are not Python's and do
    not wait for socket events.
    """
    if named := threads("pt_gloo"):
        return named
    python = {thread.native_id for thread in threading.enumerate()}
    return [thread for thread in threads() if thread not in python and not _waits_for_events(thread)]


def _waits_for_events(thread: int) -> bool:
    try:
        number = read_proc(f"/proc/self/task/{thread}/syscall").split()[0]
    except OSError:  # the thread has just ended
        return True
    return number.isdecimal() and int(number) in _EPOLL_WAITS


@dataclass(frozen=True, slots=True)
class StuckWait:
    """A thread that sleeps inside a gloo object: in a wait for a buffer or for a connection."""

    sleep: Sleep
    buffer: int
    """Address of the gloo buffer that the thread sends or fills; 0 if the thread does not wait for a buffer."""
    in_pair: bool
    """Whether the thread waits for a connection. `buffer` may also be set, because unused stack memory may look like a
    buffer."""


@dataclass(frozen=True, slots=True)
class Look:
    """The state of this process's other threads at one moment."""

    asleep: list[StuckWait]
    polled: set[int]
    """Epoll sets in which a thread waits for events."""
    running: list[int]
    """Ids of threads that run, or are ready to run."""


class LostWakeups:
    """Finds and ends waits in this process for which gloo has lost the wake-up."""

    def __init__(self, torch: ctypes.PyDLL, cpp: ctypes.PyDLL, c: ctypes.PyDLL) -> None:
        self._c = c
        # an object's first word points 16 bytes into its class's virtual function table, behind offset and type
        self._buffer, self._pair = _address(torch, _BUFFER) + 16, _address(torch, _PAIR) + 16
        self._tell = torch[_TELL_BUFFER]
        self._type = _address(cpp, "_ZTISt13runtime_error")
        self._allocate, self._prepare = cpp["__cxa_allocate_exception"], cpp["__cxa_init_primary_exception"]
        self._allocate.restype = self._prepare.restype = ctypes.c_void_p
        self._construct, self._destruct = cpp["_ZNSt13runtime_errorC1EPKc"], cpp["_ZNSt13runtime_errorD1Ev"]
        self._point = cpp["_ZNSt15__exception_ptr13exception_ptrC1EPv"]
        self._let_go = cpp["_ZNSt15__exception_ptr13exception_ptrD1Ev"]

    @classmethod
    def find(cls) -> LostWakeups | None:
        """Return an instance that uses functions of this process's libtorch; None if a function is missing."""
        if os.uname().machine not in ("x86_64", "aarch64"):
            return None
        import torch

        try:
            library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            return cls(library, ctypes.PyDLL("libstdc++.so.6"), ctypes.PyDLL(None))
        except (OSError, AttributeError, ValueError):
            return None

    def look(self) -> Look:
        """Return the threads that sleep in gloo now. Most of them wake by themselves when their data arrives."""
        own, seen = threading.get_native_id(), Look([], set(), [])
        for thread in threads():
            if thread == own:
                continue
            with contextlib.suppress(OSError):  # the thread has just ended
                syscall = read_proc(f"/proc/self/task/{thread}/syscall")
                number, *arguments = syscall.split()
                sleep = _sleep(thread, syscall)
                if sleep is not None and sleep.timed and (lost := self._object_around(sleep)):
                    seen.asleep.append(lost)
                elif number == "running":
                    seen.running.append(thread)
                elif arguments and int(number) in _EPOLL_WAITS:
                    seen.polled.add(int(arguments[0], 16))
        return seen

    def end(self, lost: StuckWait, why: str) -> None:
        """Make a wait for a buffer raise. Must be called only for a wait that nothing else can end, because a thread
        that continues could free the buffer during the call.

        The GIL is held from the last check to the call of gloo's function, so that a woken Python thread cannot free
        the buffer. To keep the GIL, this method uses no Python file objects, and no library that releases the GIL.
        """
        pointer = self._exception(why)
        target, argument = ctypes.c_void_p(lost.buffer), ctypes.byref(pointer)
        if self._sleeping_still(lost.sleep):
            self._tell(target, argument)
        self._let_go(argument)

    def _sleeping_still(self, sleep: Sleep) -> bool:
        """Return whether a thread still sleeps on the same futex. Does not release the GIL."""
        file = self._c.open(f"/proc/self/task/{sleep.thread}/syscall".encode(), os.O_RDONLY | os.O_CLOEXEC)
        if file < 0:
            return False
        text = ctypes.create_string_buffer(_SYSCALL_BYTES)
        read = self._c.read(file, text, _SYSCALL_BYTES)
        self._c.close(file)
        return read > 0 and _sleep(sleep.thread, text.raw[:read].decode()) == sleep

    def _object_around(self, sleep: Sleep) -> StuckWait | None:
        """Return the wait in the gloo object that contains the futex. The object begins before the futex's address."""
        place, words = sleep.address & ~7, b""
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start in (place - _PAIR_BYTES, max(place - _PAIR_BYTES, place & ~4095)):
                with contextlib.suppress(OSError):  # the previous page may not be mapped
                    words = words or os.pread(memory, place - start, start)
        finally:
            os.close(memory)
        buffer, in_pair = 0, False
        for index, value in enumerate(struct.unpack(f"{len(words) // 8}Q", words)):
            found = place - len(words) + index * 8
            if value == self._pair:
                # ignore a buffer that was found before this pair, because the buffer ends before the pair begins
                buffer, in_pair = 0, True
            elif value == self._buffer and place - found < _BUFFER_BYTES:
                buffer = found
        return StuckWait(sleep, buffer, in_pair) if buffer or in_pair else None

    def _exception(self, why: str) -> ctypes.c_void_p:
        """Return a `std::exception_ptr` to a `std::runtime_error` with the message `why`."""
        error = ctypes.c_void_p(self._allocate(ctypes.c_size_t(_RUNTIME_ERROR_BYTES)))
        self._prepare(error, ctypes.c_void_p(self._type), ctypes.cast(self._destruct, ctypes.c_void_p))
        self._construct(error, ctypes.c_char_p(why.encode()))
        pointer = ctypes.c_void_p()
        self._point(ctypes.byref(pointer), error)
        return pointer


def _address(library: ctypes.PyDLL, name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name))


def wait_until_idle(limit_s: float = 10.0) -> None:
    """Wait for at most `limit_s` seconds until no gloo thread has work left. Must be called before a group is
    destroyed.

    Destroying a group right after its last operation would deadlock. The group's destructor holds the GIL while it
    joins gloo's threads, and a gloo thread that must still release a tensor, or return from our store, waits for the
    GIL. A gloo thread without work is recognized because it sleeps without a timeout; waits for the GIL have a timeout.
    """
    deadline, quiet = time.monotonic() + limit_s, 0
    for number in itertools.count():
        time.sleep(0.0005)  # let other threads take the GIL
        if number % _LIST_EVERY == 0:
            threads = work_threads()
        sleeps = [sleeping(thread) for thread in threads]
        quiet = quiet + 1 if all(sleep is not None and not sleep.timed for sleep in sleeps) else 0
        if quiet == 2 or time.monotonic() > deadline:
            return
