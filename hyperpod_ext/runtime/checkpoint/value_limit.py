"""Limit the size of a state's plain values, because each save sends all plain values in one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.tree import Parts, fqn, leaf_paths

_MOST_BYTES = 48 << 20
_OF_A_NUMBER = 20
"""Assumed number of characters of a number that is written as text."""


def check_values(parts: Parts) -> None:
    """Raise an error if the values of a state that are no tensors are too large for one message.

    Raises:
        JobFailedError: the values are too large. The message names the largest value.
    """
    sizes = [_nbytes(value) for value in parts.values]
    if sum(sizes) <= _MOST_BYTES:
        return
    _, paths = leaf_paths(parts.shape)
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    raise JobFailedError(
        f"the plain values of the state take up to {sum(sizes) >> 20} MiB as text, but a snapshot can hold only "
        f"{_MOST_BYTES >> 20} MiB of them; the largest is {fqn(paths[largest])}, up to {sizes[largest] >> 20} MiB",
        hint="Store it as a tensor, by torch.tensor(numbers) or torch.frombuffer(bytearray(data), dtype=torch.uint8).",
    )


def _nbytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(map(_nbytes, value)) if isinstance(value, Sequence) else _OF_A_NUMBER
