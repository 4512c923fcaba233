"""Limit of a state's plain values, which are in the record of each snapshot, one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.tree import Parts, fqn, leaf_paths

_MOST_BYTES = 48 << 20
_OF_A_NUMBER = 20
"""Maximum length of a number as text."""


def check_values(parts: Parts) -> None:
    """
    Raises:
        JobFailedError: the plain values are too large for a record; names the largest.
    """
    sizes = [_nbytes(value) for value in parts.values]
    if sum(sizes) <= _MOST_BYTES:
        return
    _, paths = leaf_paths(parts.shape)
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    raise JobFailedError(
        f"the plain values of the state take up to {sum(sizes) >> 20} MiB as text, and a snapshot's record holds "
        f"{_MOST_BYTES >> 20} MiB; the largest is {fqn(paths[largest])}, up to {sizes[largest] >> 20} MiB",
        hint="Store it as a tensor: torch.tensor(numbers), or torch.frombuffer(bytearray(data), dtype=torch.uint8).",
    )


def _nbytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(map(_nbytes, value)) if isinstance(value, Sequence) else _OF_A_NUMBER
