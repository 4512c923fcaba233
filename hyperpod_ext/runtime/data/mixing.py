"""Mixes several sources into one stream, by weights. Computes source and sample at each place (position) of the stream.

Places are grouped into blocks of 4096. Each block has a whole number of samples from each source, in random order. The
k-th sample drawn from a source is the k-th sample of this source's own shuffled epochs. No sample is repeated before
all other samples of its source were used, even if weights change.
"""

from __future__ import annotations

import functools
import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.permutation import Permutation, Places, key_of
from hyperpod_ext.runtime.data.shuffle import ShuffleOrder, ids_at
from hyperpod_ext.runtime.data.sources import fingerprint_of, length_of

BLOCK = 4096


class Mixture:
    """Several sources that are read as one source. Sample numbers count through the first source, then the second, etc.

    `weights` are the shares of the sources, in any unit. A source of weight 0 is not used until its weight changes. A
    mixture has no end, because each source starts its next epoch independently of other sources.

    Raises:
        JobFailedError: the weights are invalid, or a source has no samples or no length.
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float]) -> None:
        self.sources = list(sources)
        self.lengths = tuple(_needed_length(index, source) for index, source in enumerate(sources))
        if len(weights) != len(self.sources):
            raise JobFailedError(
                f"Mixture: there are {len(self.sources)} sources, but {len(weights)} weights",
                hint="Give one weight per source.",
            )
        self.weights = tuple(float(weight) for weight in weights)
        quotas_of(self.weights)
        self._ends = list(accumulate(self.lengths))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        source, inside = self.locate(index)
        return self.sources[source][inside]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source index of sample number `index`, and the sample's number within its source."""
        if not 0 <= index < len(self):
            raise IndexError(f"id {index} of {len(self)} samples")
        source = bisect_right(self._ends, index)
        return source, index - (self._ends[source] - self.lengths[source])

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all sources, which does not depend on the weights."""
        fingerprints = [fingerprint_of(source) for source in self.sources]
        return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Segment:
    """The places (positions) of the stream from `start` on, until the weights change. `drawn`: number of samples drawn
    from each source before `start`."""

    start: int
    weights: tuple[float, ...]
    drawn: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def quotas_of(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of samples of each source in one block, rounded by largest remainder to the sum BLOCK.

    Raises:
        JobFailedError: a weight is negative, not finite, or too small for one sample per block.
    """
    if not weights or any(not math.isfinite(weight) or weight < 0 for weight in weights) or sum(weights) <= 0:
        raise JobFailedError(
            f"the weights {list(weights)} of a mixture are not valid",
            hint="Give finite numbers of 0 or more, not all 0.",
        )
    # fractions are exact: with floats, a rounding error could decide between equal remainders
    parts = [Fraction(weight) for weight in weights]
    total = sum(parts)
    exact = [part / total * BLOCK for part in parts]
    quotas = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda one: (quotas[one] - exact[one], one))
    for one in by_remainder[: BLOCK - sum(quotas)]:
        quotas[one] += 1
    for one, weight in enumerate(weights):
        if weight > 0 and quotas[one] == 0:
            raise JobFailedError(
                f"source {one} has weight {weight}, which is {float(parts[one] / total):.2g} of the sum of weights: "
                f"fewer than one sample in {BLOCK}",
                hint=f"Give the source at least 1/{BLOCK} of the sum of weights, or 0.",
            )
    return tuple(quotas)


def ids_of_mixture(places: Places, segment: Segment, lengths: Sequence[int], order: ShuffleOrder, seed: int) -> Places:
    """Return the sample numbers at the given places of a segment. Sample numbers count through all sources, as in
    `Mixture`."""
    sources, draws = _locate(places, segment, seed)
    ids = np.empty_like(places)
    base = 0
    for source, length in enumerate(lengths):
        mine = sources == source
        ids[mine] = base + _ids_of_draws(draws[mine], length, order, seed, source)
        base += length
    return ids


def drawn_before(place: int, segment: Segment, seed: int) -> tuple[int, ...]:
    """Return the number of samples of each source before `place`, which is in the segment or at the segment's end."""
    blocks, rest = divmod(place - segment.start, BLOCK)
    quotas = quotas_of(segment.weights)
    sources, _ = _block(segment, blocks, seed)
    begun = np.bincount(sources[:rest], minlength=len(quotas)).tolist()
    return tuple(
        before + blocks * quota + part for before, quota, part in zip(segment.drawn, quotas, begun, strict=True)
    )


def _locate(places: Places, segment: Segment, seed: int) -> tuple[Places, Places]:
    """Return the source of each place, and the number of samples drawn from the same source before the place."""
    blocks, inside = np.divmod(places - segment.start, BLOCK)
    drawn, quotas = np.array(segment.drawn, np.int64), np.array(quotas_of(segment.weights), np.int64)
    sources, draws = np.empty_like(places), np.empty_like(places)
    for block in np.unique(blocks).tolist():
        here = blocks == block
        of_block, nth = _block(segment, block, seed)
        sources[here] = of_block[inside[here]]
        draws[here] = (drawn + block * quotas)[sources[here]] + nth[inside[here]]
    return sources, draws


@functools.lru_cache(maxsize=16)
def _block(segment: Segment, block: int, seed: int) -> tuple[Places, Places]:
    """Return the source of each place in a block, and the number of the source's samples before the place in the
    block."""
    quotas = quotas_of(segment.weights)
    permutation = Permutation(BLOCK, key_of("mixture", seed, segment.start, block))
    sources = np.repeat(np.arange(len(quotas)), quotas)[permutation.at(np.arange(BLOCK))]
    nth = np.empty(BLOCK, np.int64)
    for source in range(len(quotas)):
        mine = sources == source
        nth[mine] = np.arange(np.count_nonzero(mine))
    return sources, nth


def _ids_of_draws(draws: Places, length: int, order: ShuffleOrder, seed: int, source: int) -> Places:
    """Return the sample numbers of a source's k-th draws, for each k in `draws`. Draws are counted over all epochs of
    the source."""
    epochs, places = np.divmod(draws, length)
    ids = np.empty_like(draws)
    for epoch in np.unique(epochs).tolist():
        now = epochs == epoch
        ids[now] = ids_at(places[now], length, order, seed, source, epoch)
    return ids


def _needed_length(index: int, source: Any) -> int:
    length = length_of(source)
    if not length:
        what = "has no length" if length is None else "is empty"
        raise JobFailedError(f"Mixture: source {index} {what}", hint="Leave the source out, or give it a length.")
    return length
