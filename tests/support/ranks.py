"""Ranks as real processes, with process groups opened as a worker opens them, and a parent that plays coordinator.

    def body(member):
        while member.join():                  # the groups of the next generation are open
            with member.faults():             # a generation that is cut ends here
                ... collectives ...

    with Ranks(4, body) as ranks:
        ranks.begin()
        ranks.kill(2)
        ranks.abort()                         # to the survivors, as after a detection
        ranks.start(2)
        ranks.begin()
        ranks.end()

Processes are forked from this one, which has torch imported, as workers are forked from their fork server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.process_group.gloo_backend import Gloo
from hyperpod_ext.runtime.process_group.groups import Kind, ProcessGroups
from hyperpod_ext.runtime.process_group.store import Endpoint

SECRET = b"0123456789abcdef"
HOST = "127.0.0.1"


class Member:
    """One rank, in its own process."""

    def __init__(self, rank: int, size: int, line: Connection, kind: Kind) -> None:
        self.rank, self.size, self._kind = rank, size, kind
        self.generation = 0
        self.endpoint = Endpoint(rank, SECRET, self._broke)
        self.groups = ProcessGroups()
        (self.gloo,) = (backend for backend in self.groups.backends if isinstance(backend, Gloo))
        self.opened_s = 0.0
        """How long it took to open the groups."""
        self.freed: list[dict[str, Any]] = []
        self._line = line
        self.inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._aborted_at = 0.0
        self._spent_before = spent()
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def join(self) -> bool:
        """Wait for the next generation and open its groups; False when there is no other."""
        self.send("join", self.endpoint.port)
        kind, *rest = self.inbox.get()
        while kind == "abort":
            kind, *rest = self.inbox.get()
        if kind == "end":
            return False
        self.generation, addresses = rest
        self.store = self.endpoint.open(addresses, self.generation)
        began = time.monotonic()
        self.groups.open(self.store, self.rank, self.size, self._kind)
        self.opened_s = time.monotonic() - began
        return True

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Takes what a cut generation raises, tells when, and closes the groups as the loop of a worker does."""
        raised = ""
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            freed, after = time.monotonic(), spent()
            raised = f"{type(error).__name__}: {error}"
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            while not self._aborted_at:  # heard it from a neighbour's closed socket first
                self.inbox.put(self.inbox.get())
            cpu, queued = (max(0.0, now - before) for now, before in zip(after, self._spent_before, strict=True))
            told = {"at": freed, "heard": self._aborted_at, "raised": raised, "cpu": cpu, "queued": queued}
            self.send("freed", told)
        if raised:
            self._aborted_at = 0.0
            self.groups.abort()
            self.groups.leave()

    def send(self, kind: str, *what: Any) -> None:
        with self._sending:
            self._line.send((kind, *what))

    def _listen(self) -> None:
        try:
            while (message := self._heard()) is not None:
                if message[0] == "abort":
                    self._spent_before = spent()
                    self._aborted_at = time.monotonic()
                    self.groups.abort()
                self.inbox.put(message)
        except BaseException:  # the main thread waits for this one: it would hang, and nobody know why
            traceback.print_exc()
        finally:
            os._exit(1)

    def _heard(self) -> tuple[Any, ...] | None:
        """None once the test is over."""
        with contextlib.suppress(EOFError, OSError):
            return self._line.recv()  # type: ignore[no-any-return]
        return None

    def _broke(self, why: str) -> None:
        print(why, file=sys.stderr)
        os._exit(1)


def spent() -> tuple[float, float]:
    """Seconds that this process has run, and that its main thread was ready to and waited for a core."""
    waited_ns = os.pread(_schedstat(), 256, 0).split()[1]
    return time.process_time(), int(waited_ns) / 1e9


@functools.cache
def _schedstat() -> int:
    """Kept open: what it is read for is no longer than it takes to open it."""
    return os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)


class Ranks:
    """A job of `size` ranks that run `body`, each with groups of its kind."""

    def __init__(
        self, size: int, body: Callable[[Member], None], kind: Callable[[int], Kind] = lambda rank: "gloo"
    ) -> None:
        self.size, self._body, self._kind = size, body, kind
        self._context = multiprocessing.get_context("fork")
        self.processes: dict[int, Any] = {}
        self._lines: dict[int, Connection] = {}
        self.generation = 0
        self._told: dict[int, list[tuple[Any, ...]]] = {}

    def __enter__(self) -> Ranks:
        for rank in range(self.size):
            self.start(rank)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        for line in self._lines.values():
            line.close()

    def start(self, rank: int) -> None:
        """Start the process of `rank`, or a new one after the old has died."""
        ours, theirs = self._context.Pipe()
        if rank in self._lines:
            self._lines.pop(rank).close()
        others = list(self._lines.values())
        process = self._context.Process(
            target=_run, args=(rank, self.size, self._body, theirs, [ours, *others], self._kind(rank))
        )
        gc.freeze()  # what other tests left may hold threads, which its destructor would wait for in the new process
        process.start()
        gc.unfreeze()
        theirs.close()
        self.processes[rank], self._lines[rank], self._told[rank] = process, ours, []

    def begin(self, timeout_s: float = 60.0) -> None:
        """Once every rank has asked to join, tell all that the next generation begins."""
        ports = {rank: what[0] for rank, what in self.hear("join", timeout_s=timeout_s).items()}
        self.generation += 1
        addresses = [(HOST, ports[rank]) for rank in range(self.size)]
        self.tell("begin", self.generation, addresses)

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> float:
        """Kill a rank; returns when its death was seen."""
        os.kill(self.processes[rank].pid, signum)
        wait([self.processes[rank].sentinel])
        seen = time.monotonic()
        self.processes[rank].join()
        return seen

    def abort(self, *but: int) -> None:
        """The generation is over; told to all ranks, but those that are dead."""
        message = pickle.dumps(("abort", self.generation + 1))
        for rank, line in self._lines.items():  # without a pause: the last is to hear of it when the first does
            if rank not in but:
                line.send_bytes(message)

    def tell(self, *message: Any) -> None:
        for line in self._lines.values():
            line.send(message)

    def end(self, timeout_s: float = 30.0) -> None:
        """Nothing follows: every rank's body returns, and its process ends well."""
        self.hear("join", timeout_s=timeout_s)
        self.tell("end")
        for rank, process in self.processes.items():
            process.join(timeout_s)
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"

    def hear(self, kind: str, *but: int, timeout_s: float = 30.0) -> dict[int, tuple[Any, ...]]:
        """The next message of that kind from each rank."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, tuple[Any, ...]] = {}
        missing = self._lines.keys() - set(but)
        while missing:
            for rank in list(missing):
                message = next((message for message in self._told[rank] if message[0] == kind), None)
                if message is not None:
                    self._told[rank].remove(message)
                    found[rank] = message[1:]
                    missing.discard(rank)
            if not missing:
                break
            left = deadline - time.monotonic()
            assert left > 0, f"ranks {sorted(missing)} did not say {kind!r} in {timeout_s} s"
            for line in wait([self._lines[rank] for rank in missing], left):
                rank = next(rank for rank, own in self._lines.items() if own is line)
                try:
                    self._told[rank].append(line.recv())  # type: ignore[union-attr]
                except EOFError:
                    self.processes[rank].join(timeout_s)
                    ended = self.processes[rank].exitcode
                    raise AssertionError(f"rank {rank} ended with {ended} before it said {kind!r}") from None
        return found


def _run(
    rank: int,
    size: int,
    body: Callable[[Member], None],
    line: Connection,
    inherited: list[Connection],
    kind: Kind,
) -> None:
    die_with_parent(os.getppid())
    faulthandler.enable()
    for other in inherited:  # a rank that dies must not live on in another's descriptors
        other.close()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    member = Member(rank, size, line, kind)
    body(member)
    member.groups.close()
    member.endpoint.close()
    line.send(("ended",))
