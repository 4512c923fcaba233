"""What a run must read, as plain lists: the order of the samples written out a second time, one number after another.

It knows no ranks, no resizes and no arrays; whatever happens to a job, its steps must be slices of these lists.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from fractions import Fraction

MASK = (1 << 64) - 1


def mix(word: int) -> int:
    word = ((word + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 30)) * 0x94D049BB133111EB) & MASK
    word = ((word ^ (word >> 27)) * 0xBF58476D1CE4E5B9) & MASK
    return word ^ (word >> 31)


def keys(*parts: object) -> list[int]:
    text = "\x00".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=64, person=b"hpx-order-1").digest()
    return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8)]


def permutation(n: int, key: list[int], exact: bool) -> list[int]:
    """The permutation of range(n), place by place."""
    if exact:
        words = [mix(mix(one ^ key[0]) ^ key[1]) for one in range(n)]
        assert len(set(words)) == n
        return sorted(range(n), key=words.__getitem__)
    a = math.isqrt(max(n - 1, 0)) + 1
    b = max(1, -(-n // a))
    found = []
    for place in range(n):
        while True:
            left, right = divmod(place, b)
            for turn in range(8):
                if turn % 2 == 0:
                    left = (left + mix(right ^ key[turn]) % a) % a
                else:
                    right = (right + mix(left ^ key[turn]) % b) % b
            place = left * b + right
            if place < n:
                break
        found.append(place)
    return found


def epoch_order(n: int, shuffle: object, seed: int, source: int, epoch: int, exact_up_to: int) -> list[int]:
    """Ids of one epoch of one source. `shuffle`: None, "global" or (block, window)."""
    tags = (seed, source, epoch)
    if shuffle is None:
        return [*range(n)]
    if shuffle == "global":
        return permutation(n, keys("global", *tags), n <= exact_up_to)
    block, window = shuffle  # type: ignore[misc]
    blocks = [range(start, min(n, start + block)) for start in range(0, n, block)]
    order = permutation(len(blocks), keys("blocks", *tags), len(blocks) <= exact_up_to)
    laid = [one for index in order for one in blocks[index]]
    shuffled = []
    for number, start in enumerate(range(0, n, block * window)):
        part = laid[start : start + block * window]
        inside = permutation(len(part), keys("window", *tags, number), len(part) <= exact_up_to)
        shuffled += [part[one] for one in inside]
    return shuffled


@dataclass
class Oracle:
    """The whole stream. `weights` make it a mixture of `lengths`; otherwise it is one source."""

    lengths: list[int]
    shuffle: object
    seed: int
    exact_up_to: int
    block: int = 4096
    weights: list[float] | None = None
    epoch: int = 0
    place: int = 0
    segment: int = 0
    """Where the weights began to hold."""
    drawn: list[int] = field(default_factory=list)
    """Samples of each source so far."""
    seen: dict[int, int] = field(default_factory=dict)
    """How often each id was used in this epoch."""

    def __post_init__(self) -> None:
        self._orders: dict[tuple[int, int], list[int]] = {}
        self.drawn = self.drawn or [0] * len(self.lengths)

    def take(self, batch: int, drop_last: bool) -> tuple[int, list[int]]:
        """Epoch and ids of the next step."""
        if self.weights is not None:
            return 0, [self._draw() for _ in range(batch)]
        (n,) = self.lengths
        if n - self.place < (batch if drop_last else 1):
            self._roll(drop_last)
        ids = self._order(0, self.epoch)[self.place : self.place + batch]
        for one in ids:
            self.seen[one] = self.seen.get(one, 0) + 1
        self.place += len(ids)
        epoch = self.epoch
        if n - self.place < (batch if drop_last else 1):
            self._roll(drop_last)
        return epoch, ids

    def _roll(self, drop_last: bool) -> None:
        assert set(self.seen.values()) <= {1}, "a sample came twice in an epoch"
        assert drop_last or len(self.seen) == self.lengths[0], "an epoch ended without all of its samples"
        self.epoch, self.place, self.seen = self.epoch + 1, 0, {}

    def reweigh(self, weights: list[float]) -> None:
        self.weights, self.segment = weights, self.place

    def _draw(self) -> int:
        number, inside = divmod(self.place - self.segment, self.block)
        source = self._block(number)[inside]
        epoch, place = divmod(self.drawn[source], self.lengths[source])
        self.drawn[source] += 1
        self.place += 1
        return sum(self.lengths[:source]) + self._order(source, epoch)[place]

    def _block(self, number: int) -> list[int]:
        assert self.weights is not None
        total = sum(Fraction(weight) for weight in self.weights)
        exact = [Fraction(weight) / total * self.block for weight in self.weights]
        quotas = [math.floor(one) for one in exact]
        for one in sorted(range(len(exact)), key=lambda one: (quotas[one] - exact[one], one))[
            : self.block - sum(quotas)
        ]:
            quotas[one] += 1
        laid = [source for source, quota in enumerate(quotas) for _ in range(quota)]
        key = keys("mixture", self.seed, self.segment, number)
        return [laid[one] for one in permutation(self.block, key, self.block <= self.exact_up_to)]

    def _order(self, source: int, epoch: int) -> list[int]:
        if (source, epoch) not in self._orders:
            n = self.lengths[source]
            self._orders[source, epoch] = epoch_order(n, self.shuffle, self.seed, source, epoch, self.exact_up_to)
        return self._orders[source, epoch]
