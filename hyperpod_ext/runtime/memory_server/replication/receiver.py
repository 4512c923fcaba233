"""Serves a node's snapshots to the other nodes of the job over TCP, and receives copies of their snapshots.

Each connection has one thread. A client that does not have the job's secret gets no answer, and cannot make this
process reserve memory.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, assert_never

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError, NotFoundError
from hyperpod_ext.ports import family_of
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc import tls, unproven
from hyperpod_ext.runtime.ipc.connections import BACKLOG
from hyperpod_ext.runtime.ipc.declared import Declared, checked_version, encode
from hyperpod_ext.runtime.ipc.unproven import Unproven
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.protocol import peer_requests as p
from hyperpod_ext.runtime.memory_server.protocol.request import Done, refusal
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.replication.incoming import IncomingReplicas
from hyperpod_ext.runtime.memory_server.replication.incoming_parts import IncomingParts
from hyperpod_ext.runtime.memory_server.replication.nixl_transfer import NixlFailure, NixlTransfer, is_signed
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest, check_bytes, check_manifest, crc64nvme, crc_text

_UNPROVEN = 256  # maximum number of unauthenticated connections, each of which has a thread
_OUT_OF_DESCRIPTORS_S = 0.1  # seconds to wait for a free file descriptor


class Plans(Protocol):
    """Interface of `memory_server/plans.py`: the snapshot layouts that this node knows, by digest."""

    def get(self, digest: str) -> Plan | None: ...

    def add(self, document: dict[str, Any], digest: str) -> Plan: ...


class Disk(Protocol):
    """Interface of `node_disk.py`: snapshots of this node's ranks on the node's own disks."""

    def has(self, owner: int, save_id: str) -> bool: ...

    def pin(self, owner: int, save_id: str, who: str, *, restoring: bool = False) -> AbstractContextManager[Any]: ...


class PeerServer:
    """Answers requests of other nodes' memory servers and workers."""

    def __init__(
        self,
        own: Regions,
        replicas: Regions,
        plans: Plans,
        *,
        secret: bytes,
        job: str,
        cpu_priority: CpuPriority,
        parts: IncomingParts | None = None,
        host: str = "",
        port: int = 0,
        timeout_s: float = ps.TIMEOUT_S,
        places: int = _UNPROVEN,
        encrypted: bool = False,
        nixl: NixlTransfer | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._nixl, self._disk = nixl, disk
        self._certificate = tls.own_certificate() if encrypted else None
        self._own, self._replicas, self._plans = own, replicas, plans
        self._secret, self._job, self._timeout_s = secret, job, timeout_s
        self._cpu_priority = cpu_priority
        self._incoming = IncomingReplicas(replicas, cpu_priority)
        self._parts = parts
        self._unproven = Unproven(unproven.places(places), ps.disconnect)
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, port), family=family_of(host), backlog=BACKLOG)
        self._accepting = threading.Thread(target=self._accept, name="peers", daemon=True)

    on_events: Callable[[float, Sequence[str]], None] | None = None
    """Function that is called with event lines of another node, and with the Unix time at which that node's clock was
    0."""

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        """Start to answer requests, in separate threads."""
        self._accepting.start()

    def close(self) -> None:
        """Stop answering requests of other nodes."""
        self._closed.set()
        ps.disconnect(self._listener)
        if self._accepting.is_alive():  # else this thread could call accept() on a reused file descriptor
            self._accepting.join()
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                ps.disconnect(connection)
        for connection in self._unproven.all():
            ps.disconnect(connection)
        self._incoming.close()
        if self._parts is not None:
            self._parts.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._accept_one()
            except OSError:
                if self._closed.is_set():
                    return
                # the system has no free file descriptor, or the peer has closed the connection already
                if not self._unproven.hang_up_oldest():
                    self._closed.wait(_OUT_OF_DESCRIPTORS_S)
                continue
            self._unproven.enter(connection)
            try:
                threading.Thread(target=self._meet, args=(connection,), name="peer", daemon=True).start()
            except RuntimeError:  # the system allows no further thread; the peer may try again
                self._unproven.leave(connection)
                connection.close()

    def _accept_one(self) -> socket.socket:
        connection, _ = self._listener.accept()
        if self._certificate is None:
            return connection
        context = self._certificate.context
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _meet(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            try:
                ps.accept(connection, self._secret, self._timeout_s)
            finally:
                self._unproven.leave(connection)
            with self._lock:
                self._connections.add(connection)
            try:
                self._converse(connection)
            finally:
                with self._lock:
                    self._connections.discard(connection)
                self._incoming.lost(connection)
                if self._parts is not None:
                    self._parts.lost(connection)

    def _converse(self, connection: socket.socket) -> None:
        if not self._speaks_our_version(connection):
            return
        while ps.wait_readable(connection) and (message := wire.receive(connection)) is not None:
            try:
                request = p.PEER_REQUESTS.decode(message)
            except wire.WireError as error:  # close: an unknown number of bytes may follow the invalid message
                wire.send(connection, refusal(error))
                return
            try:
                answer = self._answer(connection, request)
                if answer is not None:
                    wire.send(connection, encode(answer))
            except (HyperpodExtError, LookupError, TypeError, ValueError) as error:
                wire.send(connection, refusal(error))

    def _speaks_our_version(self, connection: socket.socket) -> bool:
        try:
            checked_version(wire.receive(connection) or {}, "this memory server", "its peer")
        except wire.WireError as error:
            wire.send(connection, refusal(error))
            return False
        return True

    def _answer(self, connection: socket.socket, request: p.AnyPeerRequest) -> Declared | None:
        """Return the answer to one request, or None if the answer was already sent."""
        match request:
            case p.Chunk():
                self._take_chunk(connection, request.token, request.start, request.nbytes)
                return Done()
            case p.ReplicaBegin():
                return self._begin_replica(connection, request.manifest, request.plan)
            case p.PartBegin():
                return self._begin_part(connection, request)
            case p.OfferMemory():
                return p.OfferAnswer(why_not=self._take_offer(request))
            case p.ReadChunks():
                return self._read_chunks(connection, request)
            case p.ReplicaEnd():
                (self._parts_of(request.token) or self._incoming).end(request.token)
                return Done()
            case p.AskPiece():
                owner, save_id, step, wait_s = request.owner, request.save_id, request.step, request.wait_s
                return p.PieceComplete(complete=self._keeps_parity().wait_complete(owner, save_id, step, wait_s))
            case p.PieceOpen():
                return self._open_piece(request)
            case p.PieceRead():
                self._send(connection, request)
                return None
            case p.PeerHeld():
                return p.PeerSnapshots(own=tuple(self._own.held()), replicas=tuple(self._replicas.held()))
            case p.PeerOpen():
                return self._open(request.owner, request.save_id)
            case p.Read():
                self._send(connection, request)
                return None
            case p.ReadParts():
                self._send_parts(connection, request)
                return None
            case p.PeerEvents():
                if self.on_events is not None:
                    self.on_events(request.epoch, request.lines)
                return Done()
            case _:
                assert_never(request)

    def _begin_replica(
        self, connection: socket.socket, manifest: Manifest, document: dict[str, Any] | None
    ) -> p.ReplicaBegun:
        if not self._knows_plan(manifest, document):
            return p.ReplicaBegun(need_plan=True)
        if self._has(manifest):
            return p.ReplicaBegun(have=True)
        self._cpu_priority.lower_this_thread()  # the connection transfers only replicas from now on
        token, first = self._incoming.begin(manifest, connection)
        return p.ReplicaBegun(token=token, first=first)

    def _knows_plan(self, manifest: Manifest, document: dict[str, Any] | None) -> bool:
        """Verify a manifest, and return whether this node knows its plan. If `document` contains the plan, the plan is
        added first."""
        check_manifest(manifest, self._secret, job=self._job, where=f"replica of rank {manifest.get('rank')}")
        digest = str(manifest["plan"])
        plan = self._plans.get(digest)
        if plan is None:
            if document is None:
                return False
            plan = self._plans.add(document, digest)
        if plan.nbytes != manifest["nbytes"]:
            raise CorruptSnapshotError(
                f"the layout plan of {manifest['save_id']} lists {plan.nbytes} bytes, but the manifest lists "
                f"{manifest['nbytes']}"
            )
        return True

    # --- NIXL -----------------------------------------------------------------------------------

    def _take_offer(self, offer: p.OfferMemory) -> str:
        """Return why this node will not read the memory that the sender offers; empty if this node will read it."""
        if self._nixl is None:
            return "the checkpoint policy of the other node does not use NIXL"
        if not is_signed(offer, self._secret):
            return "the offer was not signed with the job's secret"
        try:
            if self._nixl.version != offer.version:
                return f"the other node has NIXL {self._nixl.version}, this one {offer.version}"
        except NixlFailure as failure:
            return f"on the other node: {failure}"
        self._incoming.offer(offer.token, functools.partial(self._nixl.read, offer))
        return ""

    def _read_chunks(self, connection: socket.socket, request: p.ReadChunks) -> p.ChunksRead:
        try:
            self._incoming.read(connection, request.token, request.start, request.nbytes)
        except NixlFailure as failure:
            return p.ChunksRead(failed=str(failure))
        return p.ChunksRead()

    # --- parity ---------------------------------------------------------------------------------

    def _begin_part(self, connection: socket.socket, request: p.PartBegin) -> p.ReplicaBegun:
        parts = self._keeps_parity()
        if not self._knows_plan(request.manifest, request.plan):
            return p.ReplicaBegun(need_plan=True)
        self._cpu_priority.lower_this_thread()  # the connection transfers only parity parts from now on
        token = parts.begin(request.manifest, request.stripe, request.crc64nvme, connection)
        return p.ReplicaBegun(token=token, have=token is None)

    def _open_piece(self, request: p.PieceOpen) -> p.PieceHead:
        piece = self._keeps_parity().pieces.open_manifest(request.owner, request.save_id)
        manifest = piece["manifests"].get(request.lost)
        plan = self._plans.get(str(manifest["plan"])) if manifest is not None else None
        if manifest is None or plan is None:
            raise NotFoundError(
                f"this node has no parity part of rank {request.lost} for {request.save_id}, or no layout plan for it"
            )
        nbytes = {rank: int(each["nbytes"]) for rank, each in piece["manifests"].items()}
        return p.PieceHead(manifest=manifest, plan=plan.to_json(), stripe=piece["stripe"], nbytes=nbytes)

    def _keeps_parity(self) -> IncomingParts:
        if self._parts is None:
            raise NotFoundError("this node keeps no parity, because its checkpoint policy has no `parity`")
        return self._parts

    def _parts_of(self, token: int) -> IncomingParts | None:
        """Return the receiver of parity parts if `token` belongs to a parity part; None if it belongs to a replica."""
        return self._parts if IncomingParts.is_token(token) else None

    # --- bytes ----------------------------------------------------------------------------------

    def _has(self, manifest: Manifest) -> bool:
        keys = ("rank", "save_id", "crc64nvme", "nbytes", "plan")
        return any(all(held[key] == manifest[key] for key in keys) for held in self._replicas.held())

    def _take_chunk(self, connection: socket.socket, token: int, start: int, nbytes: int) -> None:
        if not 0 < nbytes <= ps.CHUNK:
            raise wire.WireError(f"a chunk of {nbytes} bytes was announced; the maximum is {ps.CHUNK}")
        if (parts := self._parts_of(token)) is not None:
            parts.receive(connection, token, start, nbytes)
            return
        try:
            self._incoming.receive(connection, token, start, nbytes)
        except NotFoundError:
            # read and drop the refused chunk's bytes, because the next request follows these bytes
            ps.receive_checked(connection, memoryview(bytearray(nbytes)))
            raise

    def _open(self, owner: int, save_id: str) -> p.SnapshotHead:
        with self._where(owner, save_id).pin(owner, save_id, "open", restoring=True) as pin:
            plan = self._plans.get(str(pin.manifest["plan"]))
            if plan is None:
                raise NotFoundError(f"the plan of {save_id} of rank {owner} is not known on this node")
            return p.SnapshotHead(manifest=pin.manifest, plan=plan.to_json())

    def _send(self, connection: socket.socket, request: p.Read | p.PieceRead) -> None:
        owner, save_id, start, nbytes = request.owner, request.save_id, request.start, request.nbytes
        who = f"read by {connection.getpeername()}"
        where = self._where(owner, save_id) if isinstance(request, p.Read) else self._keeps_parity().pieces
        with where.pin(owner, save_id, who, restoring=True) as pin, pin.data as data:
            if start + nbytes > len(data):
                raise NotFoundError(f"{save_id} of rank {owner} has no {nbytes} bytes at {start}")
            wire.send(connection, encode(p.SnapshotPart(nbytes=nbytes)))
            with data[start : start + nbytes] as part:
                connection.sendall(part)

    def _send_parts(self, connection: socket.socket, request: p.ReadParts) -> None:
        """Send parts of a snapshot. Verifies the whole snapshot first, because the receiver cannot verify parts."""
        owner, save_id = request.owner, request.save_id
        who, parts = f"read by {connection.getpeername()}", list(zip(request.starts, request.nbytes, strict=True))
        with self._where(owner, save_id).pin(owner, save_id, who, restoring=True) as pin, pin.data as data:
            if any(start + nbytes > len(data) for start, nbytes in parts):
                raise NotFoundError(f"{save_id} of rank {owner} has only {len(data)} bytes, but more were requested")
            check_bytes(pin.manifest, data)
            checksum = 0
            for start, nbytes in parts:
                with data[start : start + nbytes] as part:
                    checksum = crc64nvme(part, checksum)
            wire.send(connection, encode(p.VerifiedParts(nbytes=sum(request.nbytes), crc64nvme=crc_text(checksum))))
            for start, nbytes in parts:
                with data[start : start + nbytes] as part:
                    connection.sendall(part)

    def _where(self, owner: int, save_id: str) -> Regions | Disk:
        for place in (self._own, self._replicas):
            if any((held["rank"], held["save_id"]) == (owner, save_id) for held in place.held()):
                return place
        return self._disk if self._disk is not None and self._disk.has(owner, save_id) else self._replicas
