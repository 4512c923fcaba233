"""Serves a node's snapshots to the other nodes of the job over TCP, and takes copies of theirs.

A thread a connection. Nobody without the job's secret is told anything, or can make us reserve memory.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any, Protocol

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError, NotFoundError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import Courtesy
from hyperpod_ext.runtime.memory_server.replication.incoming import IncomingReplicas
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest, check_manifest

_UNPROVEN = 256  # connections at a time that have not shown the secret yet


class Plans(Protocol):
    """Layouts known on this node, by digest."""

    def get(self, digest: str) -> Plan | None: ...

    def add(self, document: dict[str, Any], digest: str) -> Plan: ...


class PeerServer:
    """What one node's memory server answers to those of other nodes."""

    def __init__(
        self,
        own: Regions,
        replicas: Regions,
        plans: Plans,
        *,
        secret: bytes,
        job: str,
        courtesy: Courtesy,
        host: str = "",
        port: int = 0,
        patience_s: float = ps.PATIENCE_S,
    ) -> None:
        self._own, self._replicas, self._plans = own, replicas, plans
        self._secret, self._job, self._patience_s = secret, job, patience_s
        self._courtesy = courtesy
        self._incoming = IncomingReplicas(replicas, courtesy)
        self._unproven = threading.BoundedSemaphore(_UNPROVEN)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, port), backlog=128)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        """Answer from now on, in threads of their own."""
        threading.Thread(target=self._accept, name="peers", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        ps.cut(self._listener)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                ps.cut(connection)
        self._incoming.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue  # out of descriptors, or a peer that left at once
            if self._unproven.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(connection,), name="peer", daemon=True).start()
            else:
                connection.close()

    def _meet(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            try:
                ps.prepare(connection, self._patience_s)
                wire.accept_peer_blocking(connection, self._secret)
            finally:
                self._unproven.release()
            with self._lock:
                self._connections.add(connection)
            try:
                self._converse(connection)
            finally:
                with self._lock:
                    self._connections.discard(connection)
                self._incoming.lost(connection)

    def _converse(self, connection: socket.socket) -> None:
        while ps.wait_readable(connection) and (request := wire.receive(connection)) is not None:
            try:
                answer = self._answer(connection, request)
            except HyperpodExtError as error:
                answer = {"error": error.to_json()}
            except (KeyError, TypeError, ValueError) as error:
                answer = {"error": {"code": "HyperpodExtError", "message": f"malformed request: {error!r}"}}
            if answer is not None:
                wire.send(connection, answer)

    def _answer(self, connection: socket.socket, request: wire.Message) -> wire.Message | None:
        """The answer to one request; None when it has been given already."""
        match request["op"]:
            case "chunk":
                self._take_chunk(connection, int(request["token"]), int(request["start"]), int(request["nbytes"]))
            case "replica_begin":
                return self._begin_replica(connection, request["manifest"], request.get("plan"))
            case "replica_end":
                self._incoming.end(int(request["token"]))
            case "held":
                return {"own": self._own.held(), "replicas": self._replicas.held()}
            case "open":
                return self._open(int(request["owner"]), str(request["save_id"]))
            case "read":
                owner, save_id = int(request["owner"]), str(request["save_id"])
                self._send(connection, owner, save_id, int(request["start"]), int(request["nbytes"]))
                return None
            case op:
                raise ValueError(f"unknown op {op!r}")
        return {}

    def _begin_replica(self, connection: socket.socket, manifest: Manifest, document: Any) -> wire.Message:
        check_manifest(manifest, self._secret, job=self._job, where=f"replica of rank {manifest['rank']}")
        digest = str(manifest["plan"])
        plan = self._plans.get(digest)
        if plan is None:
            if document is None:
                return {"need_plan": True}
            plan = self._plans.add(document, digest)
        if plan.nbytes != manifest["nbytes"]:
            raise CorruptSnapshotError(f"the plan of {manifest['save_id']} is for {plan.nbytes} bytes")
        if self._has(manifest):
            return {"have": True}
        self._courtesy.give_way()  # from here on this connection only brings replicas, and training comes first
        return {"token": self._incoming.begin(manifest, connection)}

    def _has(self, manifest: Manifest) -> bool:
        keys = ("rank", "save_id", "crc64nvme", "nbytes", "plan")
        return any(all(held[key] == manifest[key] for key in keys) for held in self._replicas.held())

    def _take_chunk(self, connection: socket.socket, token: int, start: int, nbytes: int) -> None:
        if not 0 < nbytes <= ps.CHUNK:
            raise wire.WireError(f"a chunk of {nbytes} bytes was announced; {ps.CHUNK} is the most")
        try:
            self._incoming.receive(connection, token, start, nbytes)
        except NotFoundError:
            ps.receive_checked(connection, memoryview(bytearray(nbytes)))  # to be read over, for the next request
            raise

    def _open(self, owner: int, save_id: str) -> wire.Message:
        with self._where(owner, save_id).pin(owner, save_id, "open", restoring=True) as pin:
            plan = self._plans.get(str(pin.manifest["plan"]))
            if plan is None:
                raise NotFoundError(f"the plan of {save_id} of rank {owner} is not known on this node")
            return {"manifest": pin.manifest, "plan": plan.to_json()}

    def _send(self, connection: socket.socket, owner: int, save_id: str, start: int, nbytes: int) -> None:
        who = f"read by {connection.getpeername()}"
        with self._where(owner, save_id).pin(owner, save_id, who, restoring=True) as pin, pin.data as data:
            if not (start >= 0 and nbytes >= 0 and start + nbytes <= len(data)):
                raise NotFoundError(f"{save_id} of rank {owner} has no {nbytes} bytes at {start}")
            wire.send(connection, {"nbytes": nbytes})
            with data[start : start + nbytes] as part:
                connection.sendall(part)

    def _where(self, owner: int, save_id: str) -> Regions:
        held = any(brief["rank"] == owner and brief["save_id"] == save_id for brief in self._own.held())
        return self._own if held else self._replicas
