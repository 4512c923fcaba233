"""Bytes that somebody has changed who can write to a bucket, and who knows what a CRC is: it stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable

from durable_place import Place, folder_of

from hyperpod_ext.runtime.snapshot.layout_plan import Plan, read_plan
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

_BITS = 64


def forge(data: bytes, at: int, new: bytes, spare: int) -> bytes:
    """`data` with `new` at byte `at`, and eight bytes at `spare` that keep its CRC64-NVME.

    A CRC is linear: each bit of the eight changes it by the same, whatever the others are. So 64 equations tell them.
    """
    assert not (spare < at + len(new) and at < spare + 8), "the eight bytes would change what was forged"
    wanted, forged = crc64nvme(data), bytearray(data)
    forged[at : at + len(new)] = new
    forged[spare : spare + 8] = bytes(8)
    nothing = crc64nvme(forged)

    def effect(bit: int) -> int:
        forged[spare + bit // 8] = 1 << bit % 8
        changed = crc64nvme(forged) ^ nothing
        forged[spare + bit // 8] = 0
        return changed

    forged[spare : spare + 8] = _solve(effect, wanted ^ nothing).to_bytes(8, "little")
    assert crc64nvme(forged) == wanted
    assert forged != data
    return bytes(forged)


def _solve(effect: Callable[[int], int], wanted: int) -> int:
    """Bits whose effects, added up, are `wanted`: elimination over two elements."""
    rows: dict[int, tuple[int, int]] = {}
    """By its highest bit: an effect, and the bits that have it."""
    for bit in range(_BITS):
        change, bits = effect(bit), 1 << bit
        while change and (top := change.bit_length()) in rows:
            change, bits = change ^ rows[top][0], bits ^ rows[top][1]
        if change:
            rows[change.bit_length()] = change, bits
    found = 0
    while wanted:
        change, bits = rows[wanted.bit_length()]
        wanted, found = wanted ^ change, found ^ bits
    return found


def other_weights(plan: Plan) -> Callable[[bytes], bytes]:
    """An image whose largest tensor begins with another number; the eight bytes are in the next largest."""
    largest, next_largest = sorted(plan.items, key=lambda item: item.nbytes)[-1:-3:-1]
    assert next_largest.nbytes >= 8
    return lambda data: forge(data, largest.data, b"\x00\x00\x28\x42", next_largest.data)


def plan_of(place: Place, step: int, rank: int) -> Plan:
    """What lies where in the image of a rank."""
    folder = folder_of(place, step)
    digest = json.loads(place.read(f"{folder}/manifest.json"))["ranks"][str(rank)]["plan"]
    return read_plan(json.loads(place.read(f"{folder}/plan-{digest[:32]}.json")), digest)
