"""Serves requests of this node's processes (`protocol/requests.py`) on a Unix socket, in one thread per connection."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, assert_never

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.files import make_private_folder
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import Declared, checked_version, encode
from hyperpod_ext.runtime.memory_server.idle_exit import IdleExit
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.memory_server.protocol.request import Done, refusal
from hyperpod_ext.runtime.memory_server.slots.slots import State
from hyperpod_ext.runtime.memory_server.state import NodeMemory
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest

_BREATH_S = 0.05
_LOOK_S = 1.0
"""Seconds between two checks that the socket file still exists."""

Answer = tuple[Declared, int | None]
"""An answer, and the file descriptor that is sent with the answer, or None. After sending the answer, the server closes
its copy of that file descriptor."""


@dataclass(eq=False, slots=True)
class _Connection:
    """A connection from a process on this node."""

    socket: socket.socket
    pid: int = 0
    handshake_done: bool = False
    writers: set[tuple[int, int]] = field(default_factory=set)
    """Ranks that save over this connection, each with its process id."""

    def gone(self) -> bool:
        """Return whether the process has closed its end of the connection."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))


class Server:
    """One node's memory server, which answers only processes of the same user.

    Args:
        config: the configuration with which this process was started.
        idle_exit: ends this process when the server is idle; None if this process must not end by itself.
        later: second path, to which another process may rename the socket. If neither path exists any more, the server
            creates a new socket at `later`.
    """

    def __init__(
        self,
        path: Path,
        memory: NodeMemory,
        config: RuntimeConfig,
        idle_exit: IdleExit | None = None,
        later: Path | None = None,
    ) -> None:
        self._path, self._memory, self._config, self._idle_exit = path, memory, config, idle_exit
        self._later = later
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connections: set[_Connection] = set()
        self._writers: set[tuple[int, int]] = set()
        self._writers_changed = threading.Condition()

    def serve(self) -> NoReturn:
        """Answer requests until this process ends."""
        self._listen(self._path)
        if self._idle_exit is not None:
            self._idle_exit.start(lambda: self._memory.wait_idle(0))
        while True:
            try:
                connection, _ = self._listener.accept()
            # ignore timeouts and a lack of file descriptors: this process has snapshots, and must not end
            except OSError as error:
                if not isinstance(error, TimeoutError):
                    time.sleep(_BREATH_S)
                self._listen_again()
                continue
            try:
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()
            except RuntimeError:  # the system allows no further thread for the connection
                connection.close()
                time.sleep(_BREATH_S)

    def _listen(self, path: Path) -> None:
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(128)
        self._listener.settimeout(_LOOK_S if self._later is not None else None)

    def _listen_again(self) -> None:
        """Create the socket again if it was deleted, for example by a clean-up of the temporary directory."""
        if self._later is None or self._path.exists() or self._later.exists():
            return
        self._listener.close()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):  # the disk may be full; the next check tries again
            make_private_folder(self._later.parent)
            self._listen(self._later)

    def _converse(self, sock: socket.socket) -> None:
        connection = _Connection(sock)
        with sock, self._idle_exit or contextlib.nullcontext():
            self._connections.add(connection)
            try:
                connection.pid = wire.check_same_user(sock)
                while (message := wire.receive(sock)) is not None:
                    self._take(connection, message)
            except ConnectionError:
                pass  # the worker died or broke the protocol; a snapshot that it has not asked to seal stays unsealed
            finally:
                self._connections.discard(connection)
                self._change_writers(set(), connection.writers)

    def _take(self, connection: _Connection, message: wire.Message) -> None:
        """Handle one request and send the answer. A `Stepped` request has no answer."""
        descriptor = None
        try:
            if not connection.handshake_done:
                message = checked_version(message, "the memory server of this node", f"process {connection.pid}")
                connection.handshake_done = True
            request = r.REQUESTS.decode(message)
            if isinstance(request, r.Stepped):
                self._memory.stepped(request.owner)
                return
            if isinstance(request, r.Map):
                # a process with a new rank no longer saves as its former rank, which may belong to another process now
                before, connection.writers = connection.writers, {(request.owner, connection.pid)}
                self._change_writers(connection.writers, before - connection.writers)
                if self._memory.event_log is not None:
                    self._memory.event_log.watch(connection.pid)
            answered, descriptor = self._answer(connection, request)
            answer = encode(answered)
        except (HyperpodExtError, wire.WireError) as error:
            answer = refusal(error)
        # send the error to the client, and continue to serve
        except (LookupError, OSError, TypeError, ValueError) as error:
            answer = refusal(ValueError(f"the memory server of this node could not handle `{message['op']}`: {error}"))
        _reply(connection.socket, answer, descriptor)

    # --- saving processes -----------------------------------------------------------------------

    def _hang_up(self, pid: int) -> None:
        """Receive no more requests from a dying process whose connection the kernel has not closed yet. Requests that
        the process has already sent are still handled."""
        for connection in list(self._connections):
            if connection.pid == pid:
                with contextlib.suppress(OSError):  # the connection is closed already
                    connection.socket.shutdown(socket.SHUT_RD)
        self._memory.own.wake()

    def _change_writers(self, come: set[tuple[int, int]], gone: set[tuple[int, int]]) -> None:
        with self._writers_changed:
            self._writers = (self._writers | come) - gone
            self._writers_changed.notify_all()

    def _wait_earlier(self, owner: int, pid: int) -> None:
        """Wait until all requests from earlier processes of rank `owner` are handled, because a dead process's last
        `Seal` request may complete a snapshot."""
        with self._writers_changed:
            self._writers_changed.wait_for(lambda: all(o != owner or p == pid for o, p in self._writers))

    def _wait_others(self, pids: Collection[int], timeout_s: float) -> tuple[int, ...]:
        """Wait until no process except `pids` may still be saving. Returns the ids of processes that may still be
        saving after `timeout_s`.

        A dead process counts as saving until its last `Seal` request is handled.
        """

        def others() -> tuple[int, ...]:
            return tuple(sorted({pid for _, pid in self._writers} - set(pids)))

        with self._writers_changed:
            self._writers_changed.wait_for(lambda: not others(), timeout_s)
            return others()

    # --- requests -------------------------------------------------------------------------------

    def _answer(self, connection: _Connection, request: r.AnyRequest) -> Answer:
        match request:
            case r.Map():
                return self._map(request)
            case r.Open():
                manifest, plan, offset, descriptor = self._memory.open(request.owner, request.save_id)
                return _image(manifest, plan, offset, known=request.known_plan), descriptor
            case r.Fetch():
                manifest, plan, offset, descriptor, bound = self._memory.fetch(
                    request.url, request.folder, request.rank
                )
                return _image(manifest, plan, offset, bound=bound), descriptor
            case r.FetchHead():
                manifest, plan, bound = self._memory.fetch_head(request.url, request.folder, request.rank)
                return r.ImageHead(manifest=manifest, plan=plan.to_json(), bound=bound), None
            case r.NextSlot():
                slot = self._memory.own.next_slot(request.owner, request.when_busy, gone=connection.gone)
                return r.FreeSlot(next_slot=slot), None
            case r.Seal():
                return self._seal(request), None
            case r.Handshake():
                return r.ServerProcess(pid=os.getpid(), config=self._config.model_dump(mode="json")), None
            case r.Held():
                if request.owner is not None:
                    self._wait_earlier(request.owner, request.pid)
                held, pieces = self._memory.held(), self._memory.held_pieces()
                return r.Snapshots(snapshots=tuple(held), pieces=tuple(pieces), disk=self._memory.disk.state()), None
            case r.WaitOthers():
                return r.Others(others=self._wait_others(request.pids, request.timeout_s)), None
            case r.Durable():
                return self._memory.durable(request.exclude), None
            case r.Listen():
                return r.PeerPort(port=self._memory.listen(request.host)), None
            case r.UploadNow():
                return self._memory.upload_now(request.save_id, request.timeout_s), None
            case r.WaitIdle():
                return r.Idle(idle=self._memory.wait_idle(request.timeout_s)), None
            case r.WaitState():
                state = State[request.state.upper()]
                reached = self._memory.own.wait_state(request.owner, request.save_id, state, request.timeout_s)
                return r.Reached(reached=reached), None
            case r.Status():
                return self._memory.status(), None
            case _:
                self._obey(request)
                return Done(), None

    def _obey(self, order: r.AnyOrder) -> None:
        """Handle a request whose answer is `Done`."""
        memory = self._memory
        match order:
            case r.AddPlan():
                memory.plans.add(order.document, order.digest)
            case r.Begin():
                memory.begin(order.owner, order.slot, order.step, order.save_id, order.generation)
            case r.Stepped():
                memory.stepped(order.owner)
            case r.Resolve():
                memory.resolve(order.owner, order.save_id, keep=order.keep)
            case r.Ended():
                self._hang_up(order.pid)
            case r.Fence():
                memory.fence(order.generation, order.step, order.run, order.stored, again=order.again)
            case r.Enter():
                memory.enter(order)
            case r.Peers():
                memory.set_peers(order.peers, order.domains, order.servers_lost, order.group)
            case r.Rescale():
                memory.rescale(order.nodes, order.owners)
            case r.ReleaseDeparted():
                memory.release_departed(order.ranks, order.world_size)
            case r.KeepOnly():
                memory.keep_only(order.ranks)
            case r.ScheduleCopy():
                memory.schedule_copy(order.step, order.kind)
            case r.PeerSchedule():
                memory.schedule_peer_copies(order.step)
            case r.ReplicateNow():
                memory.replicate_now()
            case r.CheckTiers():
                self._check_tiers()
            case _:
                assert_never(order)

    def _map(self, request: r.Map) -> Answer:
        owner, slot_bytes = request.owner, request.slot_bytes
        mapped = self._memory.map(owner, slot_bytes) if slot_bytes else self._memory.own.attach(owner)
        if mapped is None:
            return r.Mapped(slots=0), None
        region, descriptor = mapped
        return r.Mapped(slots=len(region.slots), slot_bytes=region.slot_bytes), descriptor

    def _seal(self, request: r.Seal) -> r.Sealed:
        manifest = self._memory.seal(request.owner, request.slot, request.record)
        following = self._memory.own.next_slot(request.owner, "skip")
        return r.Sealed(crc64nvme=manifest["crc64nvme"], next_slot=following)

    def _check_tiers(self) -> None:
        try:
            self._memory.check_tiers()
        except HyperpodExtError:
            if self._idle_exit is not None and not self._memory.held():
                self._idle_exit.hasten()  # end soon, so that the next run starts a new server with a new environment
            raise


def _image(manifest: Manifest, plan: Plan, offset: int, *, known: str = "", bound: bool = True) -> r.Image:
    document = None if plan.digest == known else plan.to_json()
    return r.Image(manifest=manifest, plan=document, offset=offset, bound=bound)


def _reply(connection: socket.socket, answer: wire.Message, descriptor: int | None) -> None:
    try:
        wire.encode(answer)
    except wire.TooLongError as error:  # without an answer the client would wait forever
        answer = refusal(error)
    try:
        wire.send(connection, answer, [descriptor] if descriptor is not None else None)
    except ConnectionError:
        # the process is dead or has a new connection; requests that the server has received are still handled
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    finally:
        if descriptor is not None:
            os.close(descriptor)
