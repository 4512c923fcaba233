"""The order of one source's samples in one epoch. Any part of a sample order can be computed from seed, source and
epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.permutation import EXACT_UP_TO, Permutation, Places, key_of


@dataclass(frozen=True, slots=True)
class BlockShuffle:
    """Shuffles whole blocks of samples, then the samples within windows of consecutive blocks. Samples that are read
    one after the other are close to each other on disk."""

    block: int = 4096
    """Number of consecutive samples that form a block. A block should be about as large as one read from storage."""
    window: int = 16
    """Number of blocks whose samples are shuffled together. `block * window` must be at most 65536."""

    def __post_init__(self) -> None:
        if self.block < 1 or self.window < 1 or self.block * self.window > EXACT_UP_TO:
            raise JobFailedError(
                f"BlockShuffle(block={self.block}, window={self.window}) is out of range",
                hint=f"block and window are at least 1, their product is at most {EXACT_UP_TO}.",
            )


Shuffle = BlockShuffle | Literal["global", "block", False]
ShuffleOrder = BlockShuffle | Literal["global"] | None


def order_of(shuffle: Shuffle) -> ShuffleOrder:
    """Return the order of samples that a `shuffle` argument selects.

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
    """Return the name of a sample order in saved states."""
    if order is None:
        return "1/sequential"
    return f"1/block/{order.block}/{order.window}" if isinstance(order, BlockShuffle) else "1/global"


def ids_at(places: Places, n: int, order: ShuffleOrder, *key: int | str) -> Places:
    """Return the sample numbers at the given positions (`places`) of the shuffled range(n). `key` selects the
    permutation."""
    if order is None:
        return places
    if order == "global":
        return Permutation(n, key_of("global", *key)).at(places)
    return _in_blocks(_in_windows(places, n, order, key), n, order, key)


def _in_windows(places: Places, n: int, order: BlockShuffle, key: tuple[int | str, ...]) -> Places:
    """Shuffle the positions within each window of consecutive positions."""
    size = order.block * order.window
    windows = places // size
    moved = np.empty_like(places)
    for window in np.unique(windows).tolist():
        inside, start = windows == window, window * size
        permutation = Permutation(min(size, n - start), key_of("window", *key, window))
        moved[inside] = start + permutation.at(places[inside] - start)
    return moved


def _in_blocks(places: Places, n: int, order: BlockShuffle, key: tuple[int | str, ...]) -> Places:
    """Return the sample numbers at the given positions, after whole blocks were shuffled. The last block may be
    short."""
    blocks = -(-n // order.block)
    short = n - (blocks - 1) * order.block
    permutation = Permutation(blocks, key_of("blocks", *key))
    place_of_short = int(permutation.place_of(np.array([blocks - 1]))[0])
    end_of_short = place_of_short * order.block + short
    shifted = np.where(places < end_of_short, places, places + order.block - short)
    ids: Places = permutation.at(shifted // order.block) * order.block + shifted % order.block
    return ids
