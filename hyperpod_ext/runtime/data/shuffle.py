"""The order of one source's samples in one epoch. Any part of the order can be computed from seed, source and epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.permutation import EXACT_UP_TO, Permutation, Places, key_of


@dataclass(frozen=True, slots=True)
class BlockShuffle:
    """Shuffles blocks, then samples within windows of consecutive blocks, so that samples read together are close on
    disk."""

    block: int = 4096
    """Number of samples that stay together. A block should be about as large as one read from storage."""
    window: int = 16
    """Number of blocks whose samples are shuffled together. `block * window` is at most 65536."""

    def __post_init__(self) -> None:
        if self.block < 1 or self.window < 1 or self.block * self.window > EXACT_UP_TO:
            raise JobFailedError(
                f"shuffle: blocks of {self.block} in windows of {self.window}",
                hint=f"block and window are at least 1, their product is at most {EXACT_UP_TO}.",
            )


Shuffle = BlockShuffle | Literal["global", "block", False]
ShuffleOrder = BlockShuffle | Literal["global"] | None


def order_of(shuffle: Shuffle) -> ShuffleOrder:
    """Return the order for a `shuffle` argument.

    Raises:
        JobFailedError: the value is invalid.
    """
    if shuffle is False:
        return None
    if shuffle == "block":
        return BlockShuffle()
    if shuffle == "global" or isinstance(shuffle, BlockShuffle):
        return shuffle
    raise JobFailedError(f"shuffle={shuffle!r}", hint='Give "global", "block", BlockShuffle(...) or False.')


def name_of(order: ShuffleOrder) -> str:
    """Return the name by which the saved state identifies the order."""
    if order is None:
        return "1/sequential"
    return f"1/block/{order.block}/{order.window}" if isinstance(order, BlockShuffle) else "1/global"


def ids_at(places: Places, n: int, order: ShuffleOrder, *key: int | str) -> Places:
    """Return the sample numbers at these places in range(n), in the order that `key` selects."""
    if order is None:
        return places
    if order == "global":
        return Permutation(n, key_of("global", *key)).at(places)
    return _in_blocks(_in_windows(places, n, order, key), n, order, key)


def _in_windows(places: Places, n: int, order: BlockShuffle, key: tuple[int | str, ...]) -> Places:
    """Shuffle the places within each window of consecutive places."""
    size = order.block * order.window
    windows = places // size
    moved = np.empty_like(places)
    for window in np.unique(windows).tolist():
        inside, start = windows == window, window * size
        permutation = Permutation(min(size, n - start), key_of("window", *key, window))
        moved[inside] = start + permutation.at(places[inside] - start)
    return moved


def _in_blocks(places: Places, n: int, order: BlockShuffle, key: tuple[int | str, ...]) -> Places:
    """Return the sample numbers at these places, after whole blocks were shuffled. The last block may be short."""
    blocks = -(-n // order.block)
    short = n - (blocks - 1) * order.block
    permutation = Permutation(blocks, key_of("blocks", *key))
    place_of_short = int(permutation.place_of(np.array([blocks - 1]))[0])
    end_of_short = place_of_short * order.block + short
    shifted = np.where(places < end_of_short, places, places + order.block - short)
    ids: Places = permutation.at(shifted // order.block) * order.block + shifted % order.block
    return ids
