"""A worker's connection to its agent: receives generations, aborts and stop requests, and sends reports.

A separate thread receives, so that an abort reaches a rank even while its main thread hangs in a collective.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from hyperpod_ext.runtime.control_plane.finish_step import SafeToCommit
from hyperpod_ext.runtime.control_plane.stop_at_step import StopAtStep
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.connections import breaking, disconnect
from hyperpod_ext.runtime.ipc.declared import encode, read, with_version
from hyperpod_ext.runtime.ipc.environment import WorkerEnvironment
from hyperpod_ext.runtime.ipc.interface import address_of
from hyperpod_ext.runtime.ipc.resumed import Sent
from hyperpod_ext.runtime.process_group.address_book import AddressBook, LookedUp
from hyperpod_ext.runtime.process_group.groups import ProcessGroups
from hyperpod_ext.runtime.process_group.store import Endpoint, PartitionedStore
from hyperpod_ext.runtime.snapshot.select import Decision, Source
from hyperpod_ext.runtime.state.training_state import ConsistentStep

_TRIES, _AGAIN_S = 5, 0.02
"""Maximum number of a worker's attempts to reconnect to its agent, and seconds between two attempts."""


class AbortedError(Exception):
    """The generation has ended, because this rank or another rank failed. Scripts must not catch this error: the
    training loop catches it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation: the data that a rank needs to restore and train in it."""

    number: int
    decision: Decision
    addresses: tuple[tuple[str, int], ...] | LookedUp
    """Addresses of the ranks' key-value servers, by rank."""
    peers: dict[int, tuple[str, int]]
    """Addresses of the memory servers from which this node's ranks restore, by node; more may be added later."""
    moved: bool = False
    """Whether this process keeps its state, but has another rank or world size than in the previous generation."""
    memory_every: int | None = None
    """Number of steps between two snapshots in memory in this generation; None for the interval in the spec."""
    full_size: int | None = None
    """World size when no rank is missing; None if no rank is missing in this generation."""


class ControlPlane(Protocol):
    """Interface through which `@resilient` uses the process's launcher: our agent, `hyperpodrun` or `torchrun`."""

    stop_at_step: StopAtStep
    """Requests to stop this rank after a certain step."""

    @property
    def environment(self) -> WorkerEnvironment | None:
        """Rank, node and settings of this process; None before `join` if the launcher assigns ranks only in `join`."""

    @property
    def aborted(self) -> bool:
        """Whether this rank's generation has ended."""

    @property
    def safe_to_commit(self) -> bool:
        """Whether the generation has ended, and this rank may nevertheless finish and commit its current step."""

    def join(self, live: ConsistentStep | None) -> Generation:
        """Wait for the next generation and return it.

        `live`: the step whose state this process has; None if its state is not consistent."""

    def open_store(self, generation: Generation) -> PartitionedStore:
        """Return the store for the process groups of `generation`."""

    def restored(self, attempt: int, error: str) -> tuple[int | None, Decision | None]:
        """Report the end of a restore, with its error or "". `attempt`: number of the restore in the generation, from
        1.

        Returns `(step, None)` to train after `step`, or `(None, decision)` to restore again, from another source."""

    def finished(self, digest: str) -> None:
        """Report that this rank's training has ended, and wait until every rank has finished. `digest`: digest of the
        final state."""

    def event(self, event: str, **fields: Any) -> None:
        """Write an event to the job's event log."""

    def failed(self, failure: c.Failed) -> bool:
        """Report an exception of the training function. Returns False if this process must end.

        If `failed` returns True and the process is unusable, the launcher kills the process.
        """

    def wait_aborted(self, timeout_s: float | None) -> bool:
        """Wait until the generation has ended; return False after `timeout_s` seconds (None: no time limit)."""


class Session:
    """A worker's connection to its agent. Any thread may send, but only the main thread waits for answers."""

    def __init__(self, environment: WorkerEnvironment, groups: ProcessGroups) -> None:
        self.environment, self._groups = environment, groups
        self._sent, self._received = Sent(), 0
        self._socket = self._connect()
        self._inbox: queue.SimpleQueue[c.ToWorker] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._newest = 1
        self._safe_to_commit = SafeToCommit()
        self._addresses, self._peers = AddressBook(), dict[int, tuple[str, int]]()
        self.generation = 0
        self.stop_at_step = StopAtStep(self._send)
        interface = environment.config.interface
        host = address_of(interface) if interface else ""
        self._endpoint = Endpoint(environment.rank, environment.secret, _end, host)
        with contextlib.suppress(ConnectionError):  # the receiving thread will reconnect
            self._introduce()
        threading.Thread(target=self._listen, name="hpx-session", daemon=True).start()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.environment.agent_socket)
        return connection

    def _introduce(self, *, again: bool = False) -> None:
        rank, received = self.environment.rank, self._received
        handshake = c.WorkerHandshake(rank=rank, pid=os.getpid(), again=again, received=received)
        wire.send(self._socket, with_version(encode(handshake)))

    def join(self, live: ConsistentStep | None) -> Generation:
        """Wait for the next generation and return it. `live`: the step whose state this process has; None if its state
        is not consistent."""
        has = None if live is None else c.LiveState(**asdict(live))
        self._send(c.Join(live=has, store_port=self._endpoint.port))
        while True:
            order = self._inbox.get()
            if isinstance(order, c.BeginGeneration):
                self.generation = order.generation
                decision, moved = self._decision(order), self._move(order)
                self.stop_at_step.enter()
                every = order.memory_every
                self._peers = dict(order.peers)
                addresses = LookedUp(self._addresses, order.world_size, self._look_up, lambda: self.aborted)
                return Generation(self.generation, decision, addresses, self._peers, moved, every, order.full_size)

    def _decision(self, order: c.BeginGeneration | c.TryNext) -> Decision:
        """Return the decision in `order`, after adding the source from which this rank restores."""
        given, rank = order.decision, order.rank if isinstance(order, c.BeginGeneration) else self.environment.rank
        world_size = order.world_size if isinstance(order, c.BeginGeneration) else self.environment.world_size
        sources = Decision.from_json(encode(given)).sources
        own = sources.get(rank, (Source(given.others, rank, given.save_id),))
        return Decision(given.step, sources | {rank: own}, world_size)

    def _look_up(self, rank: int) -> None:
        self._send(c.LookUp(ranks=(rank,)))

    def _move(self, order: c.BeginGeneration) -> bool:
        """Set this process's rank and world size for the generation. Returns whether rank or size have changed."""
        environment = replace(self.environment, rank=order.rank, world_size=order.world_size)
        moved, self.environment = environment != self.environment, environment
        if moved:
            self._endpoint.rank = environment.rank
            each = environment.config.workers_per_node
            sizes = {"WORLD_SIZE": environment.world_size, "GROUP_WORLD_SIZE": environment.world_size // each}
            place = {"RANK": environment.rank, "GROUP_RANK": environment.rank // each}
            os.environ.update({name: str(value) for name, value in (sizes | place).items()})
        return moved

    def open_store(self, generation: Generation) -> PartitionedStore:
        return self._endpoint.open(generation.addresses, generation.number)

    def restored(self, attempt: int, error: str) -> tuple[int | None, Decision | None]:
        """Report the end of a restore, with its error or "".

        Returns `(step, None)` to train after `step`, or `(None, decision)` to restore again, from another source."""
        self._send(c.Restored(attempt=attempt, error=error))
        order: c.GoOn | c.TryNext = self._next(c.GoOn, c.TryNext)
        if isinstance(order, c.GoOn):
            return order.step, None
        self._peers.update(order.peers)
        return None, self._decision(order)

    def finished(self, digest: str) -> None:
        """Report that this rank's training has ended, and wait until every rank has finished."""
        self._send(c.Finished(digest=digest))
        self._next(c.FinishTraining)

    def event(self, event: str, **fields: Any) -> None:
        """Write an event to the job's event log."""
        self._send(c.Event(event=event, t=time.monotonic(), fields=fields))

    def failed(self, failure: c.Failed) -> bool:
        """Report an exception of the training function. Returns True: if this process must end, the agent kills it."""
        self._send(failure)
        return True

    @property
    def aborted(self) -> bool:
        """Whether this rank's generation has ended."""
        return self._newest > max(self.generation, 1)

    @property
    def safe_to_commit(self) -> bool:
        return self.aborted and self._safe_to_commit.is_so

    def wait_aborted(self, timeout_s: float | None) -> bool:
        """Wait until the generation has ended; return False after `timeout_s` seconds (None: no time limit)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.aborted:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=left)
        return True

    def _next(self, *kinds: type[Any]) -> Any:
        """Wait for an order of this generation that is of one of `kinds`, and return it.

        Raises:
            AbortedError: the generation ended before an order of these kinds arrived.
        """
        while not self.aborted:
            order = self._inbox.get()
            if isinstance(order, kinds) and order.generation == self.generation:
                return order
        raise AbortedError(f"generation {self.generation} is over")

    def _listen(self) -> None:
        while (order := self._receive() or self._resume()) is not None:
            match order:
                case c.AskStop(number=number, step=step, ends=ends):
                    self.stop_at_step.ask(number, step, ends=ends)
                    continue
                case c.StopAtStep(number=number):
                    self.stop_at_step.agree(number)
                    continue
                case c.WithdrawStop(number=number):
                    self.stop_at_step.withdraw(number)
                    continue
                case c.Addresses(generation=generation, addresses=addresses):
                    self._addresses.add(generation, addresses)
                    continue
                case c.BeginGeneration():
                    self._addresses.begin(order.generation, order.follows, order.addresses)
                case c.AbortGeneration(generation=generation):
                    if not self.aborted:
                        self._safe_to_commit.look()
                    self._newest = generation
                    self._addresses.wake()
                    self._groups.abort()
                    self.stop_at_step.withdraw()
            self._inbox.put(order)
        os._exit(1)  # a worker cannot continue without its agent

    def _receive(self) -> c.ToWorker | None:
        """Return the next valid order; None if the connection has ended. Damaged orders are logged and skipped."""
        while True:
            try:
                if (message := wire.receive(self._socket)) is None:
                    return None
            except ConnectionError:
                return None
            self._received += 1
            try:
                return c.WORKER_ORDERS.decode(message)
            except wire.WireError as error:
                sys.stderr.write(f"a message from the agent was refused: {error}\n")

    def _resume(self) -> c.ToWorker | None:
        """Reconnect to the agent, send lost reports again, and return the next order; None if the agent is dead or
        refuses this process."""
        for _ in range(_TRIES):
            try:
                with self._sending:
                    self._socket.close()
                    self._socket = self._connect()
                    self._introduce(again=True)
                    if (answer := wire.receive(self._socket)) is None:
                        return None
                    for frame in self._sent.after(read(c.WorkerResumed, answer, "answer").received):
                        with breaking():
                            self._socket.sendall(frame)
            except (FileNotFoundError, ConnectionRefusedError):
                return None
            except OSError:  # the new connection broke too: try again
                time.sleep(_AGAIN_S)
                continue
            if (order := self._receive()) is not None:
                return order
        return None

    def _send(self, report: c.FromWorker) -> None:
        """Send a report to the agent. If the connection breaks, the receiving thread reconnects and sends the report
        again."""
        own = report.model_copy(update={"generation": report.generation or self.generation})
        frame = wire.encode(encode(own))
        with self._sending:
            self._sent.add(frame)
            try:
                with breaking():
                    self._socket.sendall(frame)
            except ConnectionError:
                disconnect(self._socket)


def _end(why: str) -> None:
    """End this process, so that its agent replaces it. If the process continued, other ranks would wait forever for its
    failed key-value server."""
    sys.stderr.write(f"{why}\n")
    os._exit(1)
