"""Answers this node's requests (`protocol/requests.py`) on a Unix socket, one thread a connection."""

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
"""How often it is looked whether the socket exists, while nobody comes."""

Answer = tuple[Declared, int | None]
"""An answer and the descriptor that goes with it, which is closed once sent."""


@dataclass(eq=False, slots=True)
class _Connection:
    """One process that asks."""

    socket: socket.socket
    pid: int = 0
    handshake_done: bool = False
    writers: set[tuple[int, int]] = field(default_factory=set)
    """Ranks that save over it, each with the process id."""

    def gone(self) -> bool:
        """Whether nobody will say anything over it any more."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))


class Server:
    """One node's memory server. Only processes of the same user are answered.

    Args:
        config: what this process was started with.
        idle_exit: when to end without being told; None: never.
        later: what `path` may be renamed to. If somebody removes both, this one is made again.
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
        """Answer until this process is ended."""
        self._listen(self._path)
        if self._idle_exit is not None:
            self._idle_exit.start(lambda: self._memory.wait_idle(0))
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # nobody came; or out of descriptors: what is held is worth more than who waits
                if not isinstance(error, TimeoutError):
                    time.sleep(_BREATH_S)
                self._listen_again()
                continue
            try:
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()
            except RuntimeError:  # out of threads: the same
                connection.close()
                time.sleep(_BREATH_S)

    def _listen(self, path: Path) -> None:
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(128)
        self._listener.settimeout(_LOOK_S if self._later is not None else None)

    def _listen_again(self) -> None:
        """Make the socket again if somebody has removed it, as those do who clean the temporary directory."""
        if self._later is None or self._path.exists() or self._later.exists():
            return
        self._listener.close()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):  # the disk is full: the next look tries again
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
                pass  # the worker died or broke the protocol; what it had not asked to seal stays unsealed
            finally:
                self._connections.discard(connection)
                self._change_writers(set(), connection.writers)

    def _take(self, connection: _Connection, message: wire.Message) -> None:
        """Do what a message asks, and answer, but for a step: that one is told and not waited for."""
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
                # one that has got another number saves as its former rank no more, which a new process may be by now
                before, connection.writers = connection.writers, {(request.owner, connection.pid)}
                self._change_writers(connection.writers, before - connection.writers)
                if self._memory.event_log is not None:
                    self._memory.event_log.watch(connection.pid)
            answered, descriptor = self._answer(connection, request)
            answer = encode(answered)
        except (HyperpodExtError, wire.WireError) as error:
            answer = refusal(error)
        except (LookupError, OSError, TypeError, ValueError) as error:  # who asked is told, and what is held stays
            answer = refusal(ValueError(f"the memory server of this node could not do `{message['op']}`: {error}"))
        _reply(connection.socket, answer, descriptor)

    # --- who saves ------------------------------------------------------------------------------

    def _hang_up(self, pid: int) -> None:
        """A process will say no more, though the kernel has not closed its end yet: what it has asked for is done."""
        for connection in list(self._connections):
            if connection.pid == pid:
                with contextlib.suppress(OSError):  # closed by now
                    connection.socket.shutdown(socket.SHUT_RD)
        self._memory.own.wake()

    def _change_writers(self, come: set[tuple[int, int]], gone: set[tuple[int, int]]) -> None:
        with self._writers_changed:
            self._writers = (self._writers | come) - gone
            self._writers_changed.notify_all()

    def _wait_earlier(self, owner: int, pid: int) -> None:
        """Until all that earlier processes of `owner` had asked for is done: a dead one's last seal counts."""
        with self._writers_changed:
            self._writers_changed.wait_for(lambda: all(o != owner or p == pid for o, p in self._writers))

    def _wait_others(self, pids: Collection[int], timeout_s: float) -> tuple[int, ...]:
        """Processes that may still be saving, other than these; a dead one's last seal is waited for."""

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
        """Requests whose answer says nothing."""
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
                self._idle_exit.hasten()  # who mends the environment needs a server that has it
            raise


def _image(manifest: Manifest, plan: Plan, offset: int, *, known: str = "", bound: bool = True) -> r.Image:
    document = None if plan.digest == known else plan.to_json()
    return r.Image(manifest=manifest, plan=document, offset=offset, bound=bound)


def _reply(connection: socket.socket, answer: wire.Message, descriptor: int | None) -> None:
    try:
        wire.encode(answer)
    except wire.TooLongError as error:  # to be told, or the asker waits for ever
        answer = refusal(error)
    try:
        wire.send(connection, answer, [descriptor] if descriptor is not None else None)
    except ConnectionError:
        # the process is dead, or asks again over another connection; what it asked for after this is still done
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    finally:
        if descriptor is not None:
            os.close(descriptor)
