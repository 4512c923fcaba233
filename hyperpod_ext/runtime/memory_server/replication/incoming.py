"""Receives replicas of other nodes' snapshots, and stores their chunks in slots. No thread writes to a slot after its
replica was dropped."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hyperpod_ext.errors import CorruptSnapshotError, MemoryTierFullError, NotFoundError
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.replication.nixl_transfer import NixlFailure
from hyperpod_ext.runtime.memory_server.slots.region import Region
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.snapshot.manifest import (
    Manifest,
    check_crc,
    crc64nvme,
    crc_text,
    generation_of,
    join_checksums,
)

ReadInto = Callable[[int, Region, int, int, Callable[[], bool]], None]
"""Function that reads bytes of a snapshot from the sender's memory. The function's arguments are: offset in the
snapshot, region to write to, offset in the region, number of bytes, and a function that returns whether to stop. The
function writes no bytes after it has returned or raised."""

MOST_CHUNKS_READ = 4
"""Maximum number of chunks in one `read_chunks` request, after which a cancelled read ends at the latest."""
_SLOT_WAIT_S = 10.0  # seconds to wait for a free slot; a sealed slot is in use only while a node reads it


@dataclass(eq=False, slots=True)
class Incoming:
    """One incomplete replica, whose chunks may arrive over any connection if the sender knows the replica's token."""

    owner: int
    index: int
    manifest: Manifest
    region: Region
    data: memoryview
    begun_by: socket.socket
    checksums: dict[int, int | None] = field(default_factory=dict)
    """Checksum of each chunk, by the chunk's start offset; None while the chunk is being received."""
    receiving: set[socket.socket] = field(default_factory=set)
    read_into: ReadInto | None = None
    """Function that reads chunks from the sender's memory; None if the sender has not offered its memory."""
    unreadable: str = "the sender has not offered its memory"
    given_up: bool = False


class IncomingReplicas:
    """The replicas that this node is receiving, at most one per rank. A new `begin` for a rank drops the rank's
    incomplete replica."""

    def __init__(self, replicas: Regions, cpu_priority: CpuPriority) -> None:
        self._replicas, self._cpu_priority = replicas, cpu_priority
        self._by_token: dict[int, Incoming] = {}
        self._next_token = itertools.count(1)
        self._one_per_owner: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._changed = threading.Condition()

    def begin(self, manifest: Manifest, begun_by: socket.socket) -> tuple[int, int]:
        """Reserve a slot for a replica of the snapshot that `manifest` describes. The caller has verified the manifest.

        Returns the token for the replica's chunks, and the number of bytes from the snapshot's start that are already
        in the slot.

        Raises:
            MemoryTierFullError: this node has not enough memory, or all slots for the rank's replicas are being read.
            StaleGenerationError: a newer generation has begun.
        """
        owner, save_id, nbytes = int(manifest["rank"]), str(manifest["save_id"]), int(manifest["nbytes"])
        with self._one_per_owner[owner]:
            self._give_up(lambda other: other.owner == owner)
            region, fd = self._replicas.map(owner, nbytes)
            os.close(fd)
            index = self._replicas.next_slot(owner, "supersede", _SLOT_WAIT_S)
            if index is None:
                raise MemoryTierFullError(
                    f"the replica of rank {owner} cannot be stored: all slots for its replicas are being read"
                )
            data = region.view(index, nbytes)
            known = _known_chunks(region.slots[index].manifest, manifest, data)
            self._replicas.begin(owner, index, int(manifest["step"]), save_id, generation_of(save_id))
            token = next(self._next_token)
            with self._changed:
                self._by_token[token] = Incoming(owner, index, manifest, region, data, begun_by, dict(known))
            self._cpu_priority.copy_begins()
            return token, len(known) * ps.CHUNK

    def receive(self, sock: socket.socket, token: int, start: int, nbytes: int) -> None:
        """Receive one chunk of a replica from `sock`, directly into the replica's slot.

        Raises:
            NotFoundError: no replica expects this chunk. Before this error, no byte of the chunk is read from `sock`.
        """
        replica = self._begin_chunks(sock, token, start, nbytes, chunks=1)
        checksums: dict[int, int | None] = {start: None}
        try:
            checksums[start] = ps.receive_checked(sock, replica.data[start : start + nbytes])
        finally:
            self._end_chunks(sock, replica, checksums)

    def offer(self, token: int, read_into: ReadInto) -> None:
        """Allow chunks of a replica to be read from the sender's memory."""
        with self._changed:
            self._find(token).read_into = read_into

    def read(self, sock: socket.socket, token: int, start: int, nbytes: int) -> None:
        """Read several chunks from the sender's memory directly into the replica's slot. If the read fails, the sender
        must send these chunks again.

        Raises:
            NotFoundError: no replica expects these chunks.
            NixlFailure: the read failed. After this error, no more chunks of this replica are read from the sender's
                memory.
        """
        replica = self._begin_chunks(sock, token, start, nbytes, chunks=MOST_CHUNKS_READ)
        starts = range(start, start + nbytes, ps.CHUNK)
        checksums: dict[int, int | None] = {}
        try:
            if replica.read_into is None:
                raise NixlFailure(replica.unreadable)
            offset = replica.index * replica.region.slot_bytes + start
            replica.read_into(start, replica.region, offset, nbytes, lambda: replica.given_up)
            checksums = {at: crc64nvme(replica.data[at : min(at + ps.CHUNK, start + nbytes)]) for at in starts}
        except NixlFailure as failure:
            replica.read_into, replica.unreadable = None, str(failure)
            raise
        finally:
            self._end_chunks(sock, replica, checksums, due_again=() if checksums else starts)

    def _begin_chunks(self, sock: socket.socket, token: int, start: int, nbytes: int, chunks: int) -> Incoming:
        """Return the replica with this token, and reserve `chunks` chunks for `sock`, so that no other connection can
        send the same chunks.

        Raises:
            NotFoundError: the replica was dropped, a chunk was sent before, or the bytes are not 1 to `chunks` whole
                chunks of the replica.
        """
        with self._changed:
            replica = self._find(token)
            starts = range(start, start + nbytes, ps.CHUNK)
            due = (
                0 <= start < len(replica.data) and start % ps.CHUNK == 0 and not replica.checksums.keys() & set(starts)
            )
            if (
                not due
                or not 0 < len(starts) <= chunks
                or nbytes != min(len(starts) * ps.CHUNK, len(replica.data) - start)
            ):
                raise NotFoundError(
                    f"{nbytes} bytes at offset {start} of {replica.manifest['save_id']} were sent, but not expected"
                )
            replica.checksums.update(dict.fromkeys(starts))
            replica.receiving.add(sock)
            return replica

    def _end_chunks(
        self,
        sock: socket.socket,
        replica: Incoming,
        checksums: Mapping[int, int | None],
        due_again: Iterable[int] = (),
    ) -> None:
        """End the reservation of chunks for `sock`, and store the checksums of received chunks. Chunks in `due_again`
        may be sent again over any connection."""
        with self._changed:
            for start in due_again:
                del replica.checksums[start]
            replica.checksums.update(checksums)
            replica.receiving.discard(sock)
            self._changed.notify_all()

    def end(self, token: int) -> None:
        """After the last chunk, verify the checksum of the whole replica, and register the replica as complete.

        Raises:
            CorruptSnapshotError: the bytes do not match the manifest.
            StaleGenerationError: a newer generation has begun while the replica was received.
        """
        with self._changed:
            owner = self._find(token).owner
        with self._one_per_owner[owner]:
            with self._changed:
                replica = self._find(token)
                if replica.receiving:
                    raise NotFoundError(f"{replica.manifest['save_id']} of rank {owner} is still being received")
                del self._by_token[token]
            self._cpu_priority.copy_ends()
            check_crc(replica.manifest, *_received(replica), where=f"replica of rank {owner}")
            self._replicas.adopt(owner, replica.index, replica.manifest)

    def lost(self, sock: socket.socket) -> None:
        """Drop the incomplete replicas whose `begin` request came over the lost connection `sock`."""
        self._give_up(lambda other: other.begun_by is sock)

    def close(self) -> None:
        self._give_up(lambda _: True)

    def _find(self, token: int) -> Incoming:
        if (replica := self._by_token.get(token)) is None:
            raise NotFoundError("the replica was dropped before it was complete")
        return replica

    def _give_up(self, which: Callable[[Incoming], bool]) -> None:
        """Drop the incomplete replicas for which `which` returns true. Returns once no thread writes to the slots of
        the dropped replicas."""
        with self._changed:
            gone = {token: replica for token, replica in self._by_token.items() if which(replica)}
            for token, replica in gone.items():
                del self._by_token[token]
                replica.given_up = True
                for sock in replica.receiving:
                    ps.disconnect(sock)
            self._changed.wait_for(lambda: not any(replica.receiving for replica in gone.values()))
        for _ in gone:
            self._cpu_priority.copy_ends()


def _known_chunks(before: Manifest, manifest: Manifest, data: memoryview) -> dict[int, int]:
    """Return the checksums, by start offset, of a snapshot's first chunks with frozen parameters, if the slot already
    contains these chunks. The slot's old snapshot `before` must have the same frozen parameters (`frozen` in both
    manifests), which are verified by reading the slot's bytes."""
    frozen = manifest.get("extras", {}).get("frozen")
    if not frozen or (before.get("plan"), before.get("extras", {}).get("frozen")) != (manifest["plan"], frozen):
        return {}
    nbytes, checksum = int(frozen[0]), str(frozen[1])
    starts = range(0, nbytes, ps.CHUNK)
    found = {start: crc64nvme(data[start : min(start + ps.CHUNK, nbytes)]) for start in starts}
    if crc_text(join_checksums([(found[start], min(ps.CHUNK, nbytes - start)) for start in starts])) != checksum:
        return {}
    return {start: found[start] for start in starts if start + ps.CHUNK <= nbytes}


def _received(replica: Incoming) -> tuple[int, int]:
    """Return number and checksum of a replica's received bytes. Raises CorruptSnapshotError if a chunk is missing."""
    nbytes, parts = len(replica.data), []
    for start in range(0, nbytes, ps.CHUNK):
        if (checksum := replica.checksums.get(start)) is None:
            raise CorruptSnapshotError(f"replica of rank {replica.owner}: the bytes from {start} on were not received")
        parts.append((checksum, min(ps.CHUNK, nbytes - start)))
    return nbytes, join_checksums(parts)
