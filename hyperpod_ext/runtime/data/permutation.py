"""A keyed permutation of range(n). Any part of the permutation can be computed separately. The result is the same on
every machine, and for every version of Python, numpy and torch.

Up to 2**16 items, random words are sorted, which gives an exactly uniform permutation. For more items, a Feistel
network over a x b >= n cells computes each position separately, in constant memory. The network has eight rounds,
because the result of four rounds visibly differs from a random permutation. Random words come from BLAKE2b and from
`_mix`, because the generators of numpy or torch may change between versions.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

EXACT_UP_TO = 1 << 16
ROUNDS = 8
MOST = 1 << 62
"""Maximum number of items of a permutation."""

Places = NDArray[np.int64]
_Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def key_of(*parts: int | str) -> bytes:
    """Return a key of 64 bytes, computed from `parts`."""
    text = "\x00".join(f"{type(part).__name__}:{part}" for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=64, person=b"hpx-order-1").digest()


class Permutation:
    """A permutation of range(n), chosen by `key` (64 bytes, see `key_of`)."""

    def __init__(self, n: int, key: bytes) -> None:
        if not 0 <= n <= MOST:
            raise ValueError(f"a permutation of {n} items: 0 to 2**62 are possible")
        self.n = n
        self._key = key
        self._feistel = Feistel(n, key) if n > EXACT_UP_TO else None

    def __len__(self) -> int:
        return self.n

    def at(self, places: Places) -> Places:
        """Return the items at the given positions (`places`), as int64 of the same shape. Positions must be in
        range(n)."""
        if self.n == 1:  # fast path: in a mixture, a source with one sample starts many epochs in one step
            return np.zeros_like(places)
        if self._feistel is not None:
            return self._feistel.at(places)
        return _drawn(self.n, self._key)[places].astype(np.int64)

    def place_of(self, items: Places) -> Places:
        """Return the positions of the given items: the inverse of `at`."""
        if self._feistel is not None:
            return self._feistel.place_of(items)
        return np.argsort(_drawn(self.n, self._key)).astype(np.int64)[items]


class Feistel:
    """A permutation of range(n) by a Feistel network on pairs (left, right) in a x b, where a and b are about sqrt(n).

    A result outside range(n) is permuted again until it is in range(n) (cycle walking), which is rare, because a x b
    exceeds n by less than a.
    """

    def __init__(self, n: int, key: bytes, rounds: int = ROUNDS) -> None:
        self._n = np.uint64(n)
        root = math.isqrt(max(n - 1, 0)) + 1
        self._a, self._b = np.uint64(root), np.uint64(max(1, -(-n // root)))
        self._keys = np.frombuffer(key, "<u8").astype(np.uint64)[np.arange(rounds) % 8]

    def at(self, places: Places) -> Places:
        return self._walk(places, self._forward)

    def place_of(self, items: Places) -> Places:
        return self._walk(items, self._back)

    def _walk(self, values: Places, through: Callable[[_Words], _Words]) -> Places:
        found = through(values.astype(np.uint64).ravel())
        while (outside := found >= self._n).any():
            found[outside] = through(found[outside])
        return found.astype(np.int64).reshape(values.shape)

    def _forward(self, values: _Words) -> _Words:
        left, right = values // self._b, values % self._b
        for index, key in enumerate(self._keys):
            if index % 2 == 0:
                left = (left + _mix(right ^ key) % self._a) % self._a
            else:
                right = (right + _mix(left ^ key) % self._b) % self._b
        return left * self._b + right

    def _back(self, values: _Words) -> _Words:
        left, right = values // self._b, values % self._b
        for index, key in reversed([*enumerate(self._keys)]):
            if index % 2 == 0:
                left = (left + self._a - _mix(right ^ key) % self._a) % self._a
            else:
                right = (right + self._b - _mix(left ^ key) % self._b) % self._b
        return left * self._b + right


def _mix(words: _Words) -> _Words:
    """Apply SplitMix64's finaliser to each word, after which each bit depends on all bits of the original word."""
    words = (words + _GOLDEN) * _MIX1
    words = (words ^ (words >> _S30)) * _MIX2
    words = (words ^ (words >> _S27)) * _MIX1
    return words ^ (words >> _S31)


@functools.lru_cache(maxsize=64)
def _drawn(n: int, key: bytes) -> NDArray[np.uint16]:
    """Return the whole permutation of range(n) for n <= 2**16, as 16-bit items in at most 128 KiB."""
    keys = np.frombuffer(key, "<u8").astype(np.uint64)
    counter = np.arange(n, dtype=np.uint64)
    turn = np.uint64(0)
    while True:
        words = _mix(_mix(counter ^ keys[0]) ^ (keys[1] + turn))
        order = np.argsort(words, kind="stable")
        if n < 2 or (np.diff(words[order]) != 0).all():  # draw again if words are equal: sorting would keep their order
            break
        turn += np.uint64(1)
    drawn = order.astype(np.uint16)
    drawn.setflags(write=False)
    return drawn
