"""Requests of memory servers and restoring workers to the memory server of another node over TCP, and the answers.

Both sides have proved before that they have the job's secret. The first message of a connection contains only the
protocol's version.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpod_ext.runtime.ipc.declared import ByNumber, Bytes, Count, Declared, Kinds, Listed, Seconds
from hyperpod_ext.runtime.memory_server.protocol.request import Done, Request


class PeerSnapshots(Declared):
    own: Listed[dict[str, Any]]
    """Snapshots of the node's own ranks, in the form of the answer to the workers' `held`."""
    replicas: Listed[dict[str, Any]]


class PeerHeld(Request[PeerSnapshots]):
    """List the node's snapshots."""

    sender = "worker"
    op: Literal["held"] = "held"


class SnapshotHead(Declared):
    manifest: dict[str, Any]
    plan: dict[str, Any]
    """The layout."""


class PeerOpen(Request[SnapshotHead]):
    """Open a snapshot, to restore from another node's memory."""

    sender = "worker"
    op: Literal["open"] = "open"
    owner: Count
    """Rank that saved it."""
    save_id: str


class SnapshotPart(Declared):
    """The bytes follow this message."""

    nbytes: Bytes


class Read(Request[SnapshotPart]):
    """Read a part of an opened image."""

    sender = "worker"
    op: Literal["read"] = "read"
    owner: Count
    """Rank that saved it."""
    save_id: str
    start: Bytes
    nbytes: Bytes


class VerifiedParts(Declared):
    """The bytes of all parts follow this message, in order."""

    nbytes: Bytes
    crc64nvme: str
    """Checksum of these bytes."""


class ReadParts(Request[VerifiedParts]):
    """Verify all of an opened image, then read parts of it, for a restore with another number of ranks."""

    sender = "worker"
    op: Literal["read_parts"] = "read_parts"
    owner: Count
    """Rank that saved it."""
    save_id: str
    starts: Listed[Bytes]
    """First byte of each part."""
    nbytes: Listed[Bytes]
    """Length of each part."""


class PieceHead(Declared):
    """Description of a lost rank's image and of one parity piece."""

    manifest: dict[str, Any]
    """Manifest of the lost rank's snapshot."""
    plan: dict[str, Any]
    """Layout of the lost rank's snapshot."""
    stripe: Listed[Count]
    """Ranks of the stripe, in the order in which their images are cut."""
    nbytes: ByNumber[Bytes]
    """Length of each image with a part in the piece, by rank."""


class PieceOpen(Request[PieceHead]):
    """Open a parity piece, to rebuild the state of a rank that was lost with its node."""

    sender = "worker"
    op: Literal["piece_open"] = "piece_open"
    owner: Count
    """Rank of the receiving node in the same stripe; the piece is stored under it."""
    save_id: str
    lost: Count
    """Rank that restores."""


class PieceRead(Request[SnapshotPart]):
    """Read a part of a parity piece."""

    sender = "worker"
    op: Literal["piece_read"] = "piece_read"
    owner: Count
    """Like `owner` of `piece_open`."""
    save_id: str
    start: Bytes
    nbytes: Bytes


class ReplicaBegun(Declared):
    """Exactly one of `token`, `need_plan` and `have` is set."""

    token: Count | None = None
    """Token of the chunks that may now be sent."""
    first: Count = 0
    """Number of bytes from the start of the image that the receiver already has: frozen parameters."""
    need_plan: bool = False
    """The receiver lacks the layout: send the request again with it."""
    have: bool = False
    """The receiver already has the replica."""


class ReplicaBegin(Request[ReplicaBegun]):
    """Prepare to receive a copy of a snapshot."""

    sender = "memory server"
    op: Literal["replica_begin"] = "replica_begin"
    manifest: dict[str, Any]
    """Signed with the job's secret."""
    plan: dict[str, Any] | None = None
    """The layout, if the receiver lacks it (`need_plan`)."""


class PartBegin(Request[ReplicaBegun]):
    """Prepare to receive a part of a snapshot and XOR it into the node's parity piece."""

    sender = "memory server"
    op: Literal["part_begin"] = "part_begin"
    manifest: dict[str, Any]
    """Manifest of the whole snapshot, signed with the job's secret."""
    plan: dict[str, Any] | None = None
    """The layout, if the receiver lacks it (`need_plan`)."""
    stripe: Listed[Count]
    """Ranks of the stripe, according to the sender."""
    crc64nvme: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", examples=["00000000000000ab"])]
    """Checksum of the part."""


class PieceComplete(Declared):
    complete: bool
    """False: parts of other ranks have not arrived yet."""


class AskPiece(Request[PieceComplete]):
    """Return whether a parity piece has the parts of all its ranks. Until then the sender keeps the step before."""

    sender = "memory server"
    op: Literal["ask_piece"] = "ask_piece"
    owner: Count
    """Rank of the part that the sender has sent."""
    save_id: str
    step: Count
    wait_s: Annotated[Seconds, Field(le=10.0)]
    """Maximum wait before the answer."""


class OfferAnswer(Declared):
    why_not: str = ""
    """Why the receiver cannot read the memory, so that the bytes must be sent as `chunk`s; empty: it can."""


class OfferMemory(Request[OfferAnswer]):
    """Read the bytes of a begun replica from the sender's memory with NIXL."""

    sender = "memory server"
    op: Literal["offer_memory"] = "offer_memory"
    token: Count
    version: str
    """Version of NIXL, which must be the same on both sides."""
    metadata: Annotated[str, Field(max_length=1 << 20)]
    """NIXL's metadata for access to that memory, in base64."""
    address: Count
    """Start address of the image in that memory."""
    signature: str
    """Signature of all fields with the job's secret: NIXL must only read metadata of the job's own processes."""


class ChunksRead(Declared):
    failed: str = ""
    """Why the read failed, so that the chunks must be sent; empty: it succeeded."""


class ReadChunks(Request[ChunksRead]):
    """Read bytes of a replica from the offered memory, a few chunks at once."""

    sender = "memory server"
    op: Literal["read_chunks"] = "read_chunks"
    token: Count
    start: Bytes
    nbytes: Bytes


class Chunk(Request[Done]):
    """Receive a chunk of a replica or of a parity part; its bytes follow. Several may come before the first answer."""

    sender = "memory server"
    op: Literal["chunk"] = "chunk"
    token: Count
    start: Bytes
    nbytes: Bytes


class ReplicaEnd(Request[Done]):
    """Complete a replica or a parity part after its last chunk."""

    sender = "memory server"
    op: Literal["replica_end"] = "replica_end"
    token: Count


class PeerEvents(Request[Done]):
    """Add events of a node's processes to the job's metrics, which node 0's memory server exports."""

    sender = "memory server"
    op: Literal["events"] = "events"
    epoch: float
    """Unix time at 0 of the clock of these events."""
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
