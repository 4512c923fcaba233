"""Requests to the memory server of another node over TCP, and the server's answers. The requests are sent by memory
servers, and by workers that restore a snapshot.

Before the first request on a connection, both sides have proved that they have the job's secret. The first message of a
connection contains only the version of the protocol.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpod_ext.runtime.ipc.declared import ByNumber, Bytes, Count, Declared, Kinds, Listed, Seconds
from hyperpod_ext.runtime.memory_server.protocol.request import Done, Request


class PeerSnapshots(Declared):
    own: Listed[dict[str, Any]]
    """Snapshots of the node's own ranks, in the form of the answer to a worker's `held` request."""
    replicas: Listed[dict[str, Any]]


class PeerHeld(Request[PeerSnapshots]):
    """List the node's snapshots."""

    sender = "worker"
    op: Literal["held"] = "held"


class SnapshotHead(Declared):
    manifest: dict[str, Any]
    plan: dict[str, Any]
    """The snapshot's layout."""


class PeerOpen(Request[SnapshotHead]):
    """Open a snapshot in this node's memory, so that a rank of another node can restore it."""

    sender = "worker"
    op: Literal["open"] = "open"
    owner: Count
    """Rank that saved the snapshot."""
    save_id: str


class SnapshotPart(Declared):
    """Header of an answer. The requested bytes of a snapshot or parity piece follow this message."""

    nbytes: Bytes


class Read(Request[SnapshotPart]):
    """Return a part of a snapshot's bytes."""

    sender = "worker"
    op: Literal["read"] = "read"
    owner: Count
    """Rank that saved the snapshot."""
    save_id: str
    start: Bytes
    nbytes: Bytes


class VerifiedParts(Declared):
    """The bytes of all requested parts follow this message, in the order of the request."""

    nbytes: Bytes
    crc64nvme: str
    """CRC64-NVME of the bytes that follow this message: all requested parts, one after the other."""


class ReadParts(Request[VerifiedParts]):
    """Verify all bytes of a snapshot, then return parts of the snapshot. A worker that restores with a different number
    of ranks sends this request."""

    sender = "worker"
    op: Literal["read_parts"] = "read_parts"
    owner: Count
    """Rank that saved the snapshot."""
    save_id: str
    starts: Listed[Bytes]
    """Offset of each part in the snapshot."""
    nbytes: Listed[Bytes]
    """Number of bytes in each part."""


class PieceHead(Declared):
    """Description of a lost rank's snapshot, and of a parity piece from which a part of the snapshot can be rebuilt."""

    manifest: dict[str, Any]
    """Manifest of the lost rank's snapshot."""
    plan: dict[str, Any]
    """Layout of the lost rank's snapshot."""
    stripe: Listed[Count]
    """Ranks that share the parity (the stripe), in ascending order."""
    nbytes: ByNumber[Bytes]
    """Size of each snapshot that has a part in the piece, by rank."""


class PieceOpen(Request[PieceHead]):
    """Open a parity piece (XOR of parts of other nodes' snapshots), to rebuild the state of a rank that was lost with
    its node."""

    sender = "worker"
    op: Literal["piece_open"] = "piece_open"
    owner: Count
    """Rank under which the receiving node stores the piece: the node's own rank in the stripe."""
    save_id: str
    lost: Count
    """Lost rank whose state is to be rebuilt."""


class PieceRead(Request[SnapshotPart]):
    """Return a part of a parity piece's bytes."""

    sender = "worker"
    op: Literal["piece_read"] = "piece_read"
    owner: Count
    """Rank under which the piece is stored, as in `piece_open`."""
    save_id: str
    start: Bytes
    nbytes: Bytes


class ReplicaBegun(Declared):
    """The receiver's answer to `replica_begin` or `part_begin`. One of `token`, `need_plan` and `have` is set."""

    token: Count | None = None
    """Token that the sender must put into each `chunk` message; null if the sender must not send chunks now."""
    first: Count = 0
    """Number of bytes at the snapshot's start that the receiver already has from an earlier replica, because they are
    frozen parameters."""
    need_plan: bool = False
    """Whether the receiver lacks the snapshot's layout, so that the sender must repeat the request with the layout."""
    have: bool = False
    """Whether the receiver already has the replica, or the complete parity piece."""


class ReplicaBegin(Request[ReplicaBegun]):
    """Prepare to receive a replica (copy) of a snapshot."""

    sender = "memory server"
    op: Literal["replica_begin"] = "replica_begin"
    manifest: dict[str, Any]
    """Manifest of the snapshot, signed with the job's secret."""
    plan: dict[str, Any] | None = None
    """The snapshot's layout, sent only after an answer with `need_plan`."""


class PartBegin(Request[ReplicaBegun]):
    """Prepare to receive a part of a snapshot, and to XOR it into the node's parity piece."""

    sender = "memory server"
    op: Literal["part_begin"] = "part_begin"
    manifest: dict[str, Any]
    """Manifest of the whole snapshot, signed with the job's secret."""
    plan: dict[str, Any] | None = None
    """The snapshot's layout, sent only after an answer with `need_plan`."""
    stripe: Listed[Count]
    """Ranks that share the parity (the stripe), according to the sender."""
    crc64nvme: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", examples=["00000000000000ab"])]
    """CRC64-NVME of the part."""


class PieceComplete(Declared):
    complete: bool
    """Whether the parity piece is complete; false if parts of other ranks have not arrived yet."""


class AskPiece(Request[PieceComplete]):
    """Return whether a parity piece has the parts of all ranks that share it. Until the parity piece is complete, the
    sender keeps its snapshot of the previous step."""

    sender = "memory server"
    op: Literal["ask_piece"] = "ask_piece"
    owner: Count
    """The sender's rank whose part was sent for the parity piece."""
    save_id: str
    step: Count
    wait_s: Annotated[Seconds, Field(le=10.0)]
    """Maximum number of seconds to wait before answering."""


class OfferAnswer(Declared):
    why_not: str = ""
    """Why the receiver cannot read the sender's memory, so that the sender must send `chunk` messages; empty if the
    receiver can read the memory."""


class OfferMemory(Request[OfferAnswer]):
    """Offer the sender's memory, from which the receiver can read the bytes of a replica with NIXL. The sender of a
    replica sends this request after `replica_begin`."""

    sender = "memory server"
    op: Literal["offer_memory"] = "offer_memory"
    token: Count
    version: str
    """Version of NIXL on the sender's node, which must be the same on the receiver's node."""
    metadata: Annotated[str, Field(max_length=1 << 20)]
    """NIXL's metadata for access to the offered memory, in base64."""
    address: Count
    """Start address of the snapshot in the offered memory."""
    signature: str
    """Signature of all fields with the job's secret, which proves that the metadata comes from a process of this
    job."""


class ChunksRead(Declared):
    failed: str = ""
    """Why the read failed, so that the sender must send the chunks; empty if the read succeeded."""


class ReadChunks(Request[ChunksRead]):
    """Read several chunks of a replica at once from the memory that the sender has offered."""

    sender = "memory server"
    op: Literal["read_chunks"] = "read_chunks"
    token: Count
    start: Bytes
    nbytes: Bytes


class Chunk(Request[Done]):
    """Receive a chunk of a replica or of a part for a parity piece. The chunk's bytes follow this message. The sender
    may send several chunks before it reads the first answer."""

    sender = "memory server"
    op: Literal["chunk"] = "chunk"
    token: Count
    start: Bytes
    nbytes: Bytes


class ReplicaEnd(Request[Done]):
    """Complete a replica, or a part for a parity piece. The sender sends this request after the last chunk."""

    sender = "memory server"
    op: Literal["replica_end"] = "replica_end"
    token: Count


class PeerEvents(Request[Done]):
    """Add events of a node's processes to the job's metrics. This request is sent to node 0's memory server, which
    exports the metrics."""

    sender = "memory server"
    op: Literal["events"] = "events"
    epoch: float
    """Unix time at which the monotonic clock of the sender's node was 0."""
    lines: Listed[str]
    """Lines of an event log."""


AnyPeerRequest = (
    PeerHeld
    | PeerOpen
    | Read
    | ReadParts
    | PieceOpen
    | PieceRead
    | ReplicaBegin
    | PartBegin
    | AskPiece
    | OfferMemory
    | ReadChunks
    | Chunk
    | ReplicaEnd
    | PeerEvents
)
PEER_REQUESTS: Kinds[AnyPeerRequest] = Kinds(
    "request of another node to a memory server", "op", typing.get_args(AnyPeerRequest)
)
