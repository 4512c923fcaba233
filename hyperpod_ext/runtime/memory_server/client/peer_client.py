"""Client for another node's memory server: reads its list of snapshots, and their manifests, plans and bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError, UnreachableError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.protocol.peer_requests import (
    PeerEvents,
    PeerHeld,
    PeerOpen,
    PieceHead,
    PieceOpen,
    PieceRead,
    Read,
    ReadParts,
)
from hyperpod_ext.runtime.memory_server.protocol.request import A, Request, read_answer
from hyperpod_ext.runtime.snapshot.layout_plan import Plan, read_plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest, check_manifest, crc_text, join_checksums, without_run

_VERIFIED_A_SECOND = 256 << 20
"""Assumed minimum rate, in bytes per second, at which a node verifies a snapshot before it answers."""


class PeerClient:
    """Connections to the memory server of one other node. Thread-safe.

    Errors of the server are raised with their original types. UnreachableError means that the server is gone, is too
    slow, or belongs to another job.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, timeout_s: float = ps.TIMEOUT_S, *, encrypted: bool = False
    ) -> None:
        self._host, self._port, self._secret, self._timeout_s = host, port, secret, timeout_s
        self._encrypted = encrypted
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def held(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return two lists with summaries of complete snapshots on the node: snapshots of its own ranks, and replicas
        of other nodes' snapshots."""
        with self._connection() as sock:
            held = _ask(sock, PeerHeld())
        return list(held.own), list(held.replicas)

    def send_events(self, epoch: float, lines: Sequence[str]) -> None:
        """Send event log lines for the job's metrics. `epoch` is the Unix time at which this node's monotonic clock was
        0."""
        with self._connection() as sock:
            _ask(sock, PeerEvents(epoch=epoch, lines=tuple(lines)))

    def open(self, owner: int, save_id: str, *, job: str) -> tuple[Manifest, Plan]:
        """Return the verified manifest and plan of a complete snapshot. The snapshot's bytes are not verified.

        Raises:
            NotFoundError: the node does not have the snapshot.
            CorruptSnapshotError: the manifest belongs to another job.
        """
        with self._connection() as sock:
            head = _ask(sock, PeerOpen(owner=owner, save_id=save_id))
        return head.manifest, self._verified(head.manifest, head.plan, owner, save_id, job)

    def _verified(self, manifest: Manifest, document: dict[str, Any], owner: int, save_id: str, job: str) -> Plan:
        """Return the plan of a snapshot, after verifying the manifest and the plan."""
        check_manifest(manifest, self._secret, job=job)
        if manifest.get("rank") != owner or manifest.get("save_id") != without_run(save_id)[0]:
            raise CorruptSnapshotError(f"{self} sent another snapshot than {save_id} of rank {owner}")
        plan = read_plan(document, manifest["plan"])
        if plan.nbytes != manifest["nbytes"]:
            raise CorruptSnapshotError(
                f"the layout plan of {save_id} lists {plan.nbytes} bytes, but the manifest lists {manifest['nbytes']}"
            )
        return plan

    def open_piece(self, owner: int, save_id: str, lost: int, *, job: str) -> tuple[PieceHead, Plan]:
        """Return the description of the parity piece stored under rank `owner`, and the verified plan of rank `lost`.

        Raises:
            NotFoundError: the node does not have the parity piece.
            CorruptSnapshotError: the manifest belongs to another job.
        """
        with self._connection() as sock:
            head = _ask(sock, PieceOpen(owner=owner, save_id=save_id, lost=lost))
        return head, self._verified(head.manifest, head.plan, lost, save_id, job)

    def read_piece_into(self, owner: int, save_id: str, start: int, destination: memoryview) -> None:
        """Fill `destination` with bytes of the parity piece stored under rank `owner`. The bytes are not verified."""
        self._receive(PieceRead(owner=owner, save_id=save_id, start=start, nbytes=len(destination)), [destination])

    def read_into(self, owner: int, save_id: str, start: int, destination: memoryview) -> int:
        """Fill `destination` with a snapshot's bytes from offset `start` on. Returns the CRC64-NVME of these bytes."""
        return self._read(owner, save_id, start, [destination])

    def read_scattered(
        self, owner: int, save_id: str, pieces: Sequence[tuple[int, memoryview]], nbytes: int, streams: int = 2
    ) -> int:
        """Read a whole snapshot over several connections. Returns the snapshot's CRC64-NVME, which the caller must
        compare with the manifest.

        Args:
            pieces: offset in the snapshot and writable buffer of each wanted part, in order of offsets. Bytes outside
                the wanted parts are only used for the checksum.
            nbytes: size of the snapshot in bytes.
        """
        ends = [0, *(start + len(piece) for start, piece in pieces)]
        if any(start < end for (start, _), end in zip(pieces, ends, strict=False)) or ends[-1] > nbytes:
            raise ValueError("the pieces overlap, are out of order, or are outside of the snapshot")
        per_stream = -(-nbytes // streams)
        parts = [_part(pieces, first, min(first + per_stream, nbytes)) for first in range(0, nbytes, per_stream)]
        checksums: dict[int, int] = {}

        def work(part: int) -> None:
            checksums[part] = self._read(owner, save_id, part * per_stream, parts[part])

        if failures := ps.in_threads(work, len(parts), f"from {self}"):
            raise failures[0]
        return join_checksums([(checksums[i], sum(map(len, part))) for i, part in enumerate(parts)])

    def read_parts(self, owner: int, save_id: str, parts: Sequence[tuple[int, memoryview]], nbytes: int) -> None:
        """Read parts of a snapshot. The other node first verifies the whole snapshot, and then sends the parts with a
        checksum of their bytes.

        Args:
            parts: offset in the snapshot and writable buffer of each part.
            nbytes: size of the snapshot in bytes.

        Raises:
            NotFoundError: the node no longer has the snapshot.
            CorruptSnapshotError: the snapshot is damaged on the other node, or the parts were damaged in transit.
        """
        starts, sizes = tuple(start for start, _ in parts), tuple(len(destination) for _, destination in parts)
        with self._connection() as sock:
            sock.settimeout(self._timeout_s + nbytes / _VERIFIED_A_SECOND)
            head = _ask(sock, ReadParts(owner=owner, save_id=save_id, starts=starts, nbytes=sizes))
            sock.settimeout(self._timeout_s)
            if head.nbytes != sum(sizes):
                raise wire.WireError("it does not send the requested bytes")
            checksum = ps.receive_scattered(sock, [destination for _, destination in parts if len(destination)])
        if crc_text(checksum) != head.crc64nvme:
            raise CorruptSnapshotError(f"{self}: parts of {save_id} of rank {owner} were damaged in transit")

    def _read(self, owner: int, save_id: str, start: int, destinations: Sequence[memoryview]) -> int:
        nbytes = sum(map(len, destinations))
        return self._receive(Read(owner=owner, save_id=save_id, start=start, nbytes=nbytes), destinations)

    def _receive(self, request: Read | PieceRead, destinations: Sequence[memoryview]) -> int:
        with self._connection() as sock:
            if _ask(sock, request).nbytes != request.nbytes:
                raise wire.WireError(f"it does not send the {request.nbytes} requested bytes")
            return ps.receive_scattered(sock, destinations)

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """Yield a connection to the node for one request and its answer: an idle connection, or else a new one."""
        try:
            sock = self._take_idle() or ps.connect(
                self._host, self._port, self._secret, self._timeout_s, encrypted=self._encrypted
            )
            try:
                yield sock
            except HyperpodExtError:  # this error was the server's complete answer, so the connection can be used again
                self._give_back(sock)
                raise
            except BaseException:
                sock.close()
                raise
            self._give_back(sock)
        except OSError as error:
            raise UnreachableError(f"{self}: {error or type(error).__name__}") from error

    def _take_idle(self) -> socket.socket | None:
        with self._lock:
            while self._idle:
                sock = self._idle.pop()
                if not ps.wait_readable(sock, 0):
                    return sock
                sock.close()  # a readable socket although no answer is due: the peer has closed the connection
        return None

    def _give_back(self, sock: socket.socket) -> None:
        with self._lock:
            self._idle.append(sock)

    def __str__(self) -> str:
        return f"peer {self._host}:{self._port}"


def _ask(sock: socket.socket, request: Request[A]) -> A:
    wire.send(sock, encode(request))
    answer = wire.receive(sock)
    if answer is None:
        raise wire.WireError("it closed the connection")
    return read_answer(request, answer)


def _part(pieces: Sequence[tuple[int, memoryview]], first: int, end: int) -> list[memoryview]:
    """Return buffers, in order, into which the snapshot's bytes from `first` to `end` are received.

    Bytes outside all `pieces` are received into scratch memory.
    """
    # two receive calls fit into this buffer: a call must not overwrite bytes whose checksum is not computed yet
    scratch, free = memoryview(bytearray(2 * ps.PIECE)), 0
    segments: list[memoryview] = []
    position = first
    for start, destination in (*pieces, (end, memoryview(b""))):
        stop = min(start, end)
        while position < stop:
            length = min(stop - position, ps.PIECE)
            free = free if free + length <= len(scratch) else 0
            segments.append(scratch[free : free + length])
            free, position = free + length, position + length
        segment = destination[max(0, first - start) : max(0, end - start)]
        if len(segment):
            segments.append(segment)
            position += len(segment)
    return segments
