"""What memory servers and restoring workers ask the memory server of another node over TCP, and what it answers.

Both have shown the job's secret before. The first message of a connection carries the protocol's version alone.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpod_ext.runtime.ipc.declared import ByNumber, Bytes, Count, Declared, Kinds, Listed, Seconds
from hyperpod_ext.runtime.memory_server.protocol.request import Done, Request


class PeerSnapshots(Declared):
    own: Listed[dict[str, Any]]
    """Of the node's own ranks, as in the answer to `held` of workers."""
    replicas: Listed[dict[str, Any]]


class PeerHeld(Request[PeerSnapshots]):
    """Which snapshots the other node has."""

    sender = "worker"
    op: Literal["held"] = "held"


class SnapshotHead(Declared):
    manifest: dict[str, Any]
    plan: dict[str, Any]
    """The layout."""


class PeerOpen(Request[SnapshotHead]):
    """A rank restores from another node's memory."""

    sender = "worker"
    op: Literal["open"] = "open"
    owner: Count
    """Rank that saved it."""
    save_id: str


class SnapshotPart(Declared):
    """The bytes follow."""

    nbytes: Bytes


class Read(Request[SnapshotPart]):
    """A rank restores: a part of an image that it has opened."""

    sender = "worker"
    op: Literal["read"] = "read"
    owner: Count
    """Rank that saved it."""
    save_id: str
    start: Bytes
    nbytes: Bytes


class VerifiedParts(Declared):
    """The bytes of all parts follow, one after another."""

    nbytes: Bytes
    crc64nvme: str
    """Of these bytes."""


class ReadParts(Request[VerifiedParts]):
    """A rank of another number of ranks restores: parts of an image that it has opened, after all of it was verified
    there."""

    sender = "worker"
    op: Literal["read_parts"] = "read_parts"
    owner: Count
    """Rank that saved it."""
    save_id: str
    starts: Listed[Bytes]
    """First byte of each part."""
    nbytes: Listed[Bytes]
    """And how many there are."""


class PieceHead(Declared):
    """What is needed to rebuild one rank's image."""

    manifest: dict[str, Any]
    """Of the lost rank's snapshot."""
    plan: dict[str, Any]
    """Its layout."""
    stripe: Listed[Count]
    """The ranks whose images protect each other, in the order in which these are cut."""
    nbytes: ByNumber[Bytes]
    """Length of each image that has a part in the piece."""


class PieceOpen(Request[PieceHead]):
    """A rank whose state was lost with its node restores."""

    sender = "worker"
    op: Literal["piece_open"] = "piece_open"
    owner: Count
    """Rank of the asked node that is in the same stripe: its node keeps the piece under that."""
    save_id: str
    lost: Count
    """The rank that restores."""


class PieceRead(Request[SnapshotPart]):
    """A part of a parity piece."""

    sender = "worker"
    op: Literal["piece_read"] = "piece_read"
    owner: Count
    """As in `piece_open`."""
    save_id: str
    start: Bytes
    nbytes: Bytes


class ReplicaBegun(Declared):
    """One of `token`, `need_plan` and `have` is set."""

    token: Count | None = None
    """Under which the image is sent."""
    first: Count = 0
    """Bytes from the start of the image that are there already: of parameters that are not trained."""
    need_plan: bool = False
    """The layout is not known there: ask again with it."""
    have: bool = False
    """The replica is there already."""


class ReplicaBegin(Request[ReplicaBegun]):
    """A snapshot is due to be copied."""

    sender = "memory server"
    op: Literal["replica_begin"] = "replica_begin"
    manifest: dict[str, Any]
    """Signed with the job's secret."""
    plan: dict[str, Any] | None = None
    """The layout, where the other side has asked for it."""


class PartBegin(Request[ReplicaBegun]):
    """A snapshot is due, and its group keeps parity: the part that this node is to XOR into its piece."""

    sender = "memory server"
    op: Literal["part_begin"] = "part_begin"
    manifest: dict[str, Any]
    """Of the whole snapshot, signed with the job's secret."""
    plan: dict[str, Any] | None = None
    """As in `replica_begin`."""
    stripe: Listed[Count]
    """The ranks whose images protect each other, as the sender knows them."""
    crc64nvme: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", examples=["00000000000000ab"])]
    """Of the part."""


class PieceComplete(Declared):
    complete: bool
    """False: parts of others have yet to come."""


class AskPiece(Request[PieceComplete]):
    """A part was sent: are those of all others of its stripe there, too? Until then the step before is kept."""

    sender = "memory server"
    op: Literal["ask_piece"] = "ask_piece"
    owner: Count
    """Rank whose part was sent."""
    save_id: str
    step: Count
    wait_s: Annotated[Seconds, Field(le=10.0)]
    """How long the answer may take."""


class OfferAnswer(Declared):
    why_not: str = ""
    """Why the bytes are to be sent as `chunk`s; empty: they are read as they are announced."""


class OfferMemory(Request[OfferAnswer]):
    """A replica was begun, and its bytes may be read from the sender's memory with NIXL."""

    sender = "memory server"
    op: Literal["offer_memory"] = "offer_memory"
    token: Count
    version: str
    """Of NIXL: both sides need the same."""
    metadata: Annotated[str, Field(max_length=1 << 20)]
    """What NIXL needs to reach that memory, in base64."""
    address: Count
    """Where the image begins there."""
    signature: str
    """Of all this, with the job's secret: NIXL reads no metadata that the job's processes have not written."""


class ChunksRead(Declared):
    failed: str = ""
    """Why they could not be read, and are still due; empty: they are there."""


class ReadChunks(Request[ChunksRead]):
    """Bytes of a replica are to be read from the memory that was offered; a few chunks at once."""

    sender = "memory server"
    op: Literal["read_chunks"] = "read_chunks"
    token: Count
    start: Bytes
    nbytes: Bytes


class Chunk(Request[Done]):
    """A part of a replica, or of a part for parity; its bytes follow. Some are sent before the first is answered."""

    sender = "memory server"
    op: Literal["chunk"] = "chunk"
    token: Count
    start: Bytes
    nbytes: Bytes


class ReplicaEnd(Request[Done]):
    """All chunks of a replica, or of a part for parity, were sent."""

    sender = "memory server"
    op: Literal["replica_end"] = "replica_end"
    token: Count


class PeerEvents(Request[Done]):
    """Events of a node's processes, for the memory server that shows the job's numbers."""

    sender = "memory server"
    op: Literal["events"] = "events"
    epoch: float
    """Unix time at 0 of the clock of these events."""
    lines: Listed[str]
    """As in an event log."""


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
