"""Receives parts of other nodes' snapshots, and XORs all parts of a step into one parity piece on this node.

A parity piece can be used once all its parts have arrived and match their checksums. Until a piece is complete, a lost
rank is rebuilt from the piece of an earlier step. If the transfer of a part is interrupted, the whole piece is dropped,
because it contains only some of the part's bytes. The next due step makes a new piece.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.errors import CorruptSnapshotError, MemoryTierFullError, NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.replication.parity_group import ParityGroup
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.snapshot.manifest import Manifest, crc_text, generation_of, join_checksums
from hyperpod_ext.runtime.snapshot.parity import Stripe
from hyperpod_ext.runtime.snapshot.xor import fill_with_zeros, xor_into

_FIRST_TOKEN = 1 << 32
"""Smallest token of a part. All tokens of replicas are smaller."""
_SLOT_WAIT_S = 10.0  # seconds to wait for a free slot; a complete piece's slot is in use only while a node reads it
_TIMEOUT_S = 2 * ps.TIMEOUT_S
"""Maximum seconds to wait for missing parts of a parity piece while no byte of a part arrives."""


@dataclass(eq=False, slots=True)
class _Piece:
    """One incomplete parity piece."""

    stripe: Stripe
    holder: int
    number: tuple[int, int]
    """Generation and step of the snapshots whose parts are in the piece."""
    save_id: str
    index: int
    data: memoryview
    moved_at: float
    manifests: dict[int, Manifest] = field(default_factory=dict)
    """Manifests of the snapshots whose parts have begun to arrive, by rank."""
    ended: set[int] = field(default_factory=set)
    given_up: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Lock held while bytes are XORed into the piece."""


@dataclass(eq=False, slots=True)
class _Part:
    piece: _Piece
    owner: int
    nbytes: int
    checksum: str
    begun_by: socket.socket
    checksums: dict[int, int | None] = field(default_factory=dict)
    """Checksum of each chunk, by the chunk's start offset; None while the chunk is being received."""

    def is_due(self, start: int, nbytes: int) -> bool:
        """Return whether this chunk of the part is expected and has not arrived yet."""
        begins_one = 0 <= start < self.nbytes and start % ps.CHUNK == 0
        return begins_one and nbytes == min(ps.CHUNK, self.nbytes - start) and start not in self.checksums


class IncomingParts:
    """The parity pieces on this node. Each rank of the node belongs to a different stripe (ranks that share parity),
    and the node has one parity piece per stripe. Thread-safe.

    Args:
        pieces: memory of the pieces. A piece is stored under the rank of this node that belongs to the piece's stripe.
    """

    def __init__(self, pieces: Regions, cpu_priority: CpuPriority, timeout_s: float = _TIMEOUT_S) -> None:
        self.pieces, self._cpu_priority, self._timeout_s = pieces, cpu_priority, timeout_s
        self.group: ParityGroup | None = None
        self._unfinished: dict[int, _Piece] = {}
        self._parts: dict[int, _Part] = {}
        self._given_up: dict[int, tuple[int, int]] = {}
        """Generation and step of the newest dropped piece, by this node's rank in the stripe. Parts for a dropped piece
        are refused."""
        self._asked: dict[int, tuple[tuple[int, int], float]] = {}
        """Generation and step of the last `AskPiece` request for each rank of this node, and the time of the first
        request for this step."""
        self._tokens = itertools.count(_FIRST_TOKEN)
        self._beginning = threading.Lock()
        self._changed = threading.Condition()
        self._scratch = threading.local()

    @staticmethod
    def is_token(token: int) -> bool:
        return token >= _FIRST_TOKEN

    def set_group(self, group: ParityGroup | None, *, replaced: bool) -> None:
        """Set the group of nodes that keep parity for each other. `replaced` is true if a node of the group was
        replaced."""
        with self._beginning, self._changed:
            if replaced or group != self.group:
                self._give_up([*self._unfinished.values()])
            self.group = group

    def fence(self, generation: int, step: int | None) -> None:
        """Begin a generation: drop pieces of earlier generations after `step`, as `Regions.fence` does for snapshots.
        Ends all waits for the dropped pieces."""
        self.pieces.fence(generation, step)
        with self._changed:
            if step is not None:
                self._give_up([p for p in self._unfinished.values() if p.number[1] > step and p.number[0] < generation])

    def begin(self, manifest: Manifest, ranks: Sequence[int], checksum: str, begun_by: socket.socket) -> int | None:
        """Prepare to receive a part of the snapshot that `manifest` describes, whose signature the caller has verified.
        Returns the part's token, or None if the piece is already complete.

        Raises:
            NotFoundError: this node keeps no parity piece for `ranks`, or has dropped the parity piece of this step.
            MemoryTierFullError: this node has not enough memory, or all slots for the piece are being read.
            StaleGenerationError: a newer generation has begun.
        """
        owner, save_id = int(manifest["rank"]), str(manifest["save_id"])
        number = generation_of(save_id), int(manifest["step"])
        with self._beginning:
            stripe, holder = self._place(owner, ranks)
            if self._is_complete(stripe, holder, save_id):
                return None
            with self._changed:
                piece = self._unfinished.get(holder)
                if number <= self._given_up.get(holder, (0, -1)) or (piece is not None and number < piece.number):
                    raise NotFoundError(f"the parity piece of {save_id} was dropped")
                if piece is not None and number > piece.number:
                    self._give_up([piece])
                    piece = None
            needed = stripe.piece_bytes(int(manifest["nbytes"]))
            if piece is None:
                piece = _Piece(stripe, holder, number, save_id, *self._reserve(holder, number, save_id, needed))
                with self._changed:
                    self._unfinished[holder] = piece
                self._cpu_priority.copy_begins()
            elif len(piece.data) < needed:
                self._grow(piece, needed)
            with self._changed:
                if piece.given_up or owner in piece.manifests:
                    raise NotFoundError(f"parity of {save_id} was dropped, or already has the part of rank {owner}")
                piece.manifests[owner] = manifest
                token, nbytes = next(self._tokens), stripe.span(owner, holder, int(manifest["nbytes"])).nbytes
                self._parts[token] = _Part(piece, owner, nbytes, checksum, begun_by)
                return token

    def receive(self, sock: socket.socket, token: int, start: int, nbytes: int) -> None:
        """Receive one chunk of a part from `sock`, and XOR it into the parity piece. If the chunk was received before,
        its bytes are read and dropped.

        Raises:
            NotFoundError: no part expects this chunk.
        """
        with self._changed:
            part = self._parts.get(token)
            if part is not None and part.is_due(start, nbytes):
                part.checksums[start] = None
            else:
                part = None
        checksum = self._take(sock, part.piece if part is not None else None, start, nbytes)
        with self._changed:
            if part is None or part.piece.given_up:
                raise NotFoundError("the parity part was dropped, or these bytes of it were not expected")
            part.checksums[start] = checksum
            part.piece.moved_at = time.monotonic()

    def _take(self, sock: socket.socket, piece: _Piece | None, start: int, nbytes: int) -> int:
        """Receive bytes of a part, and XOR them into `piece` from offset `start` on, unless the piece was dropped.
        Returns the checksum of the received bytes."""
        scratch = getattr(self._scratch, "buffer", None)
        if scratch is None:
            scratch = self._scratch.buffer = memoryview(bytearray(ps.PIECE))
        checksum = 0
        for at in range(start, start + nbytes, ps.PIECE):
            some = scratch[: min(ps.PIECE, start + nbytes - at)]
            checksum = ps.receive_checked(sock, some, checksum)
            if piece is not None:
                with piece.lock:
                    if not piece.given_up:
                        xor_into(piece.data[at : at + len(some)], some)
        return checksum

    def end(self, token: int) -> None:
        """Verify a part after its last chunk. The last part of a parity piece completes the piece.

        Raises:
            CorruptSnapshotError: the part's bytes do not match the checksum that its sender has announced.
            StaleGenerationError: a newer generation has begun while the piece was received.
        """
        with self._changed:
            if (part := self._parts.pop(token, None)) is None:
                raise NotFoundError("the parity part was dropped before it was complete")
            piece = part.piece
            if (why := _incomplete(part)) is not None:
                self._give_up([piece])
                raise CorruptSnapshotError(f"part of rank {part.owner} for parity of {piece.save_id}: {why}")
            piece.ended.add(part.owner)
            if piece.ended != set(piece.stripe.others(piece.holder)):
                return
            del self._unfinished[piece.holder]
            self._cpu_priority.copy_ends()
            try:
                self.pieces.adopt(piece.holder, piece.index, _record(piece))
            except StaleGenerationError:
                self._given_up[piece.holder] = max(piece.number, self._given_up.get(piece.holder, piece.number))
                raise
            finally:
                self._changed.notify_all()

    def wait_complete(self, owner: int, save_id: str, step: int, seconds: float) -> bool:
        """Wait at most `seconds` until the parity piece for the stripe of rank `owner` is complete. Returns whether the
        piece is complete.

        Raises:
            NotFoundError: the piece was dropped, or a newer piece has replaced it.
        """
        stripe, holder = self._place(owner, None)
        number = generation_of(save_id), step
        with self._changed:
            if self._changed.wait_for(lambda: self._is_decided(stripe, holder, number), seconds):
                if not self._is_complete(stripe, holder, save_id):
                    raise NotFoundError(f"the parity piece of {save_id} was dropped")
                return True
            piece, now = self._unfinished.get(holder), time.monotonic()
            asked = self._asked.get(holder)
            if asked is None or asked[0] != number:
                asked = self._asked[holder] = number, now
            if now - (piece.moved_at if piece is not None else asked[1]) > self._timeout_s:
                if piece is not None:
                    self._give_up([piece])
                self._given_up[holder] = max(number, self._given_up.get(holder, number))
                raise NotFoundError(f"the parity piece of {save_id} was dropped: other nodes did not send their parts")
            return False

    def _is_decided(self, stripe: Stripe, holder: int, number: tuple[int, int]) -> bool:
        """Return whether the parity piece of step `number` is complete, or can never be completed."""
        piece = self._unfinished.get(holder)
        if self._given_up.get(holder, (0, -1)) >= number or (piece is not None and piece.number > number):
            return True
        return any(
            (generation_of(str(manifest["save_id"])), int(manifest["step"])) >= number
            for manifest in self.pieces.manifests()
            if manifest["rank"] == holder and tuple(manifest["stripe"]) == stripe.ranks
        )

    def held(self) -> list[dict[str, Any]]:
        """Return summaries of all complete parity pieces."""
        return [
            {
                "rank": manifest["rank"],
                "world_size": manifest["world_size"],
                "step": manifest["step"],
                "generation": generation_of(str(manifest["save_id"])),
                "save_id": manifest["save_id"],
                "nbytes": manifest["nbytes"],
                "stripe": manifest["stripe"],
            }
            for manifest in self.pieces.manifests()
        ]

    def lost(self, sock: socket.socket) -> None:
        """Drop the incomplete pieces with a part whose `begin` request came over the lost connection `sock`."""
        with self._changed:
            self._give_up([part.piece for part in self._parts.values() if part.begun_by is sock])

    def close(self) -> None:
        with self._changed:
            self._give_up([*self._unfinished.values()])

    # --- inside ---------------------------------------------------------------------------------

    def _place(self, owner: int, ranks: Sequence[int] | None) -> tuple[Stripe, int]:
        """Return the stripe of rank `owner`, and the rank of this node in the stripe. `ranks`: the ranks of the stripe
        according to the sender's message, or None if the message has no such ranks."""
        group = self.group
        stripe = group.stripe(owner) if group is not None else None
        if group is None or stripe is None or (ranks is not None and stripe.ranks != tuple(ranks)):
            raise NotFoundError(f"this node keeps no parity piece of rank {owner}, or keeps it with other ranks")
        return stripe, group.holder(stripe)

    def _is_complete(self, stripe: Stripe, holder: int, save_id: str) -> bool:
        return any(
            manifest["rank"] == holder and manifest["save_id"] == save_id and tuple(manifest["stripe"]) == stripe.ranks
            for manifest in self.pieces.manifests()
        )

    def _reserve(
        self, holder: int, number: tuple[int, int], save_id: str, nbytes: int
    ) -> tuple[int, memoryview, float]:
        """Reserve a slot for a new parity piece, and fill the slot with zeros."""
        region, fd = self.pieces.map(holder, nbytes)
        os.close(fd)
        index = self.pieces.next_slot(holder, "supersede", _SLOT_WAIT_S)
        if index is None:
            raise MemoryTierFullError(
                f"the parity piece of rank {holder} cannot be stored: all slots for its pieces are being read"
            )
        self.pieces.begin(holder, index, number[1], save_id, number[0])
        data = region.view(index, region.slot_bytes)
        fill_with_zeros(data)
        return index, data[:nbytes], time.monotonic()

    def _grow(self, piece: _Piece, nbytes: int) -> None:
        """Enlarge a parity piece, if a part of `nbytes` is longer than all its earlier parts."""
        region, fd = self.pieces.map(piece.holder, nbytes)
        os.close(fd)
        with piece.lock:
            if region.slot_bytes >= nbytes and region.slots[piece.index].save_id == piece.save_id:
                piece.data = region.view(piece.index, nbytes)
                return
            index, data, _ = self._reserve(piece.holder, piece.number, piece.save_id, nbytes)
            xor_into(data, piece.data)
            piece.index, piece.data = index, data

    def _give_up(self, pieces: Sequence[_Piece]) -> None:
        """Drop incomplete parity pieces. Returns once no thread writes to the slots of the dropped pieces. The caller
        must hold `_changed`."""
        for piece in pieces:
            if self._unfinished.get(piece.holder) is not piece:
                continue
            with piece.lock:
                piece.given_up = True
            del self._unfinished[piece.holder]
            self._given_up[piece.holder] = max(piece.number, self._given_up.get(piece.holder, (0, -1)))
            for token in [token for token, part in self._parts.items() if part.piece is piece]:
                del self._parts[token]
            self._cpu_priority.copy_ends()
        self._changed.notify_all()


def _incomplete(part: _Part) -> str | None:
    """Return why a part is incomplete or damaged; None if the part is correct."""
    parts = []
    for start in range(0, part.nbytes, ps.CHUNK):
        if (checksum := part.checksums.get(start)) is None:
            return f"the bytes from {start} on were not received"
        parts.append((checksum, min(ps.CHUNK, part.nbytes - start)))
    found = crc_text(join_checksums(parts))
    return None if found == part.checksum else f"CRC64-NVME is {found}, but the sender announced {part.checksum}"


def _record(piece: _Piece) -> Manifest:
    """Return the manifest of a complete parity piece. A piece's manifest is unsigned: a rebuilt snapshot is verified
    with the lost rank's own manifest."""
    any_of_them = next(iter(piece.manifests.values()))
    return {
        "rank": piece.holder,
        "world_size": any_of_them["world_size"],
        "step": piece.number[1],
        "save_id": piece.save_id,
        "nbytes": len(piece.data),
        "stripe": list(piece.stripe.ranks),
        "manifests": dict(piece.manifests),
    }
