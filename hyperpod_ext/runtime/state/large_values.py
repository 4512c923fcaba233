"""Pack large plain values of a state into byte tensors. Examples are a list of a million numbers and pickled data.

The worker sends the plain values of each snapshot in one message, which has a maximum size. Large values could exceed
the maximum size of the message. A packed value is stored among the snapshot's tensors instead.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.snapshot.fast_copy import bytes_of
from hyperpod_ext.runtime.snapshot.layout_plan import read_shape
from hyperpod_ext.runtime.snapshot.tree import Path, put_together, take_apart

KEY = "_hpx_plain"
"""A large value is replaced by a dict that maps only this key to the byte tensor."""
_LARGE = 1 << 18
"""Values with at least this many numbers, characters and bytes in total are large."""
_LENGTH_BYTES = 8
_NUMBERS = frozenset({bool, int, float, type(None)})
_BYTES, _TREE = 0, 1


class LargeValues:
    """Packs large plain values into tensors. For an unchanged value, `pack` returns the same tensor each time."""

    def __init__(self) -> None:
        self._packed: dict[Path, torch.Tensor] = {}

    def pack(self, name: str, state: Any) -> Any:
        """Return the `state` of object `name` with tensors instead of its large plain values."""
        return self._pack(state, (name,))

    def _pack(self, node: Any, path: Path) -> Any:
        if (weight := _weight(node)) is not None:
            return {KEY: self._tensor(node, path)} if weight >= _LARGE else node
        if isinstance(node, Mapping):
            changed = {k: new for k, each in node.items() if (new := self._pack(each, (*path, k))) is not each}
            if changed:
                node = copy.copy(node)
                node.update(changed)
        elif isinstance(node, list | tuple):
            packed = [self._pack(each, (*path, index)) for index, each in enumerate(node)]
            if any(new is not each for new, each in zip(packed, node, strict=True)):
                return type(node)(packed)
        return node

    def _tensor(self, value: Any, path: Path) -> torch.Tensor:
        data = value if type(value) is bytes else _to_json(value)
        head = bytes([_BYTES if type(value) is bytes else _TREE]) + len(data).to_bytes(_LENGTH_BYTES, "big")
        known, size = self._packed.get(path), _rounded(len(head) + len(data))
        if known is not None and len(known) == size:
            memory = bytes_of(known)
            if memory[: len(head)] == head and memory[len(head) : len(head) + len(data)] == data:
                return known
        made = torch.frombuffer(bytearray(b"".join([head, data]).ljust(size, b"\0")), dtype=torch.uint8)
        self._packed[path] = made
        return made


def unpack(node: Any) -> Any:
    """Return the state from which `LargeValues.pack` made `node`.

    Raises:
        CorruptSnapshotError: the bytes were not written by `pack`.
    """
    if isinstance(node, Mapping):
        if tuple(node) == (KEY,) and isinstance(node[KEY], torch.Tensor):
            return _value(node[KEY])
        changed = {key: new for key, each in node.items() if (new := unpack(each)) is not each}
        if changed:
            node = copy.copy(node)
            node.update(changed)
    elif isinstance(node, list | tuple):
        unpacked = [unpack(each) for each in node]
        if any(new is not each for new, each in zip(unpacked, node, strict=True)):
            return type(node)(unpacked)
    return node


def _value(tensor: torch.Tensor) -> Any:
    memory = bytes_of(tensor.cpu().contiguous())
    data = memory[1 + _LENGTH_BYTES :][: int.from_bytes(memory[1 : 1 + _LENGTH_BYTES], "big")]
    if memory[0] == _BYTES:
        return bytes(data)
    try:
        shape, values = json.loads(bytes(data))
        return put_together(read_shape(shape), [], values)
    except (ValueError, TypeError, StopIteration) as error:
        raise CorruptSnapshotError(f"a large value of a snapshot cannot be read: {error!r}") from error


def _to_json(value: Any) -> bytes:
    parts = take_apart(value, ())
    return json.dumps([parts.shape, parts.values], separators=(",", ":")).encode()


def _weight(node: Any) -> int | None:
    """Return the total count of numbers, characters and bytes in `node`; None if `node` contains a tensor."""
    if isinstance(node, torch.Tensor):
        return None
    if isinstance(node, str | bytes):
        return len(node)
    if not isinstance(node, Mapping | list | tuple):
        return 1
    children = node.values() if isinstance(node, Mapping) else node
    if _NUMBERS.issuperset(map(type, children)):
        return len(node)
    total = len(node)
    for each in children:
        if (weight := _weight(each)) is None:
            return None
        total += weight
    return total


def _rounded(nbytes: int) -> int:
    """Round up the size of a packed value, so that a growing value rarely gets a new size.

    Each new size requires a new plan (layout) of the snapshot.
    """
    unit = 1 << max(16, nbytes.bit_length() - 3)
    return -(-nbytes // unit) * unit
