"""Send state from live ranks to ranks that have no state, over the new process group.

Several ranks that hold the same state each send a part of it at the same time. A sender copies its live tensors through
two small buffers, and needs no second copy of the whole state. The tensors' bytes are sent over the process group. The
layout plan and the checksums are sent through the job's authenticated store. The receiver verifies the checksums of all
bytes before the state is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.process_group.store import PartitionedStore
from hyperpod_ext.runtime.snapshot.fast_copy import bytes_of
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.layout_plan import Plan, read_plan
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme, crc_text
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot
from hyperpod_ext.runtime.snapshot.tree import Parts

_BUCKET_BYTES = 8 << 20


class TensorBytes(NamedTuple):
    """A range of the bytes of one tensor."""

    item: int
    """Index of the tensor in the layout plan."""
    start: int
    stop: int


Bucket = list[TensorBytes]


def buckets_of(sizes: Sequence[int], part: int, of: int, limit: int) -> list[Bucket]:
    """Divide the bytes of all tensors into equal parts, and return one part in buckets.

    The sender and the receiver compute the same buckets.

    Args:
        sizes: bytes of each tensor, in order.
        part: index of the part, from 0.
        of: number of parts.
        limit: maximum bytes of a bucket.
    """
    total = sum(sizes)
    low, high = total * part // of, total * (part + 1) // of
    buckets: list[Bucket] = []
    room = before = 0
    for item, size in enumerate(sizes):
        at, end = max(low - before, 0), min(high - before, size)
        while at < end:
            if room == 0:
                buckets.append([])
                room = limit
            stop = min(end, at + room)
            buckets[-1].append(TensorBytes(item, at, stop))
            room -= stop - at
            at = stop
        before += size
    return buckets


@dataclass(frozen=True)
class TransferOrder:
    """An order to send one part of the state to one rank."""

    receiver: int
    part: int
    """Index of the part, from 0."""
    of: int
    """Number of parts into which the state is divided; a different rank sends each part."""


def send_state(
    store: PartitionedStore,
    key: str,
    orders: Sequence[TransferOrder],
    step: int,
    parts: Parts,
    extras: Mapping[str, Any],
) -> None:
    """Send the parts of this rank's state that are listed in `orders`, one after another.

    Args:
        store: the job's store.
        key: prefix of the transfer's keys in the store.
        orders: parts and receivers.
        step: step of the state.
        parts: the split state.
        extras: additional JSON values, saved with the state.
    """
    layout, me = Layout(parts), dist.get_rank()
    plan = layout.plan
    short = {"step": step, "digest": plan.digest}  # only the sender of part 0 also sends plan and plain values
    full = short | {"plan": plan.to_json(), "values": parts.values, "extras": dict(extras)}
    for order in orders:
        store.set(_between(key, order.receiver, me), json.dumps(short if order.part else full))
    for order in orders:
        if json.loads(store.get(f"{key}/wanted/{order.receiver}")):
            buckets = buckets_of([item.nbytes for item in plan.items], order.part, order.of, _BUCKET_BYTES)
            checksums = _send(layout.locals, buckets, order.receiver)
            store.set(_between(f"{key}/sums", order.receiver, me), json.dumps(checksums))


def refuse_state(store: PartitionedStore, key: str, orders: Sequence[TransferOrder], why: str) -> None:
    """Send a refusal with the reason `why` to the receivers, instead of the state."""
    for order in orders:
        store.set(_between(key, order.receiver, dist.get_rank()), json.dumps({"refused": why}))


def receive_state(store: PartitionedStore, key: str, sources: Sequence[int]) -> Snapshot:
    """Receive this rank's state, one part from each rank in `sources`.

    Raises:
        CorruptSnapshotError: a checksum differs, a source has refused, or the sources hold different states.
    """
    me = dist.get_rank()
    headers = {source: json.loads(store.get(_between(key, me, source))) for source in sources}
    try:
        plan = _agreed(headers)
    except CorruptSnapshotError:
        store.set(f"{key}/wanted/{me}", "false")
        raise
    image = bytearray(plan.nbytes)
    places = [_flat_bytes(view) for view in views(plan, image)]
    sizes = [item.nbytes for item in plan.items]
    store.set(f"{key}/wanted/{me}", "true")
    split = [buckets_of(sizes, part, len(sources), _BUCKET_BYTES) for part in range(len(sources))]
    incoming = [_Incoming(source, buckets, places) for source, buckets in zip(sources, split, strict=True)]
    running = incoming
    while running := [each for each in running if each.take()]:  # receive from all sources in turn
        pass
    full = headers[sources[0]]
    for each in incoming:
        if json.loads(store.get(_between(f"{key}/sums", me, each.source))) != each.checksums:
            raise CorruptSnapshotError(
                f"the state of step {full['step']} from rank {each.source} does not match its CRC64-NVME"
            )
    return Snapshot(int(full["step"]), plan, full["values"], lambda: memoryview(image), full["extras"])


def _agreed(headers: Mapping[int, Mapping[str, Any]]) -> Plan:
    """Return the layout plan that all sources have announced. Check that all announcements have the same step and
    layout plan.

    Args:
        headers: the announcement of each source, by rank. The first announcement contains the plan.

    Raises:
        CorruptSnapshotError: a source has refused, or the announcements differ.
    """
    if refused := [f"rank {source}: {header['refused']}" for source, header in headers.items() if "refused" in header]:
        raise CorruptSnapshotError("; ".join(refused))
    (first, full), *others = headers.items()
    for source, header in others:
        if (header["step"], header["digest"]) != (full["step"], full["digest"]):
            raise CorruptSnapshotError(
                f"ranks {first} and {source} do not hold the same state: their tensors differ in name, type or shape"
            )
    return read_plan(full["plan"], full["digest"])


def _between(key: str, receiver: int, sender: int) -> str:
    return f"{key}/{receiver}/{sender}"


def _send(tensors: Sequence[torch.Tensor], buckets: Sequence[Bucket], receiver: int) -> list[str]:
    """Send buckets of this rank's tensors to a rank, and return the buckets' checksums.

    Two small buffers are used: one buffer is filled while the other buffer is sent.
    """
    buffers = [torch.empty(_size(bucket), dtype=torch.uint8) for bucket in buckets[:2]]
    sends: list[Any] = []
    checksums: list[str] = []
    known, source = -1, torch.empty(0)
    for number, bucket in enumerate(buckets):
        if number >= 2:
            sends[number - 2].wait()
        flat, end = buffers[number % 2][: _size(bucket)], 0
        for piece in bucket:
            if piece.item != known:
                known, source = piece.item, _flat_bytes(tensors[piece.item])
            part = source[piece.start : piece.stop]
            flat[end : end + len(part)].copy_(part)
            end += len(part)
        checksums.append(_checksum(flat))
        sends.append(dist.isend(flat, receiver, tag=number))
    for work in sends[-2:]:
        work.wait()
    return checksums


class _Incoming:
    """Receives the buckets of one source, and copies each bucket to its place in the received state. Two buckets are
    received at a time.

    Args:
        source: rank that sends the buckets.
        buckets: the buckets, in the order of sending.
        places: memory of each received tensor.
    """

    def __init__(self, source: int, buckets: Sequence[Bucket], places: Sequence[torch.Tensor]) -> None:
        self.source, self.checksums = source, list[str]()
        self._buckets, self._places = buckets, places
        self._buffers = [torch.empty(_size(bucket), dtype=torch.uint8) for bucket in buckets[:2]]
        self._works = [self._ask(number) for number in range(len(self._buffers))]

    def take(self) -> bool:
        """Wait for the next bucket, and copy it into the received state; return False if no bucket is left."""
        number = len(self.checksums)
        if number == len(self._buckets):
            return False
        self._works[number].wait()
        flat, end = self._flat(number), 0
        self.checksums.append(_checksum(flat))
        for item, start, stop in self._buckets[number]:
            self._places[item][start:stop].copy_(flat[end : end + stop - start])
            end += stop - start
        if number + 2 < len(self._buckets):
            self._works.append(self._ask(number + 2))
        return True

    def _ask(self, number: int) -> Any:
        return dist.irecv(self._flat(number), self.source, tag=number)

    def _flat(self, number: int) -> torch.Tensor:
        return self._buffers[number % 2][: _size(self._buckets[number])]


def _size(bucket: Bucket) -> int:
    return sum(piece.stop - piece.start for piece in bucket)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat tensor. A contiguous tensor on the CPU is not copied."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _checksum(flat: torch.Tensor) -> str:
    return crc_text(crc64nvme(bytes_of(flat)))
