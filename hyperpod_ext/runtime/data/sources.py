"""Sources of samples: objects with `__len__` and `__getitem__`, shards (files) that are loaded whole, or streams."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from hyperpod_ext.errors import JobFailedError


class Shards:
    """A dataset of shards (files), each of which `read(shard)` loads as a whole. The `keep` most recently used shards
    stay in memory. Use shards with `shuffle="block"`."""

    def __init__(
        self,
        lengths: Sequence[int],
        read: Callable[[int], Sequence[Any]],
        *,
        keep: int = 4,
        fingerprint: str | None = None,
    ) -> None:
        if any(length < 1 for length in lengths) or not lengths:
            raise JobFailedError("Shards: every shard needs at least one sample", hint="Leave empty shards out.")
        self.lengths = tuple(lengths)
        self.fingerprint = fingerprint or f"shards/{_digest(repr(self.lengths))}"
        self._ends = list(accumulate(self.lengths))
        self._read, self._keep = read, keep
        self._held: OrderedDict[int, Sequence[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"id {index} of {len(self)} samples")
        shard = bisect_right(self._ends, index)
        return self._samples(shard)[index - (self._ends[shard] - self.lengths[shard])]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _samples(self, shard: int) -> Sequence[Any]:
        with self._lock:
            if shard in self._held:
                self._held.move_to_end(shard)
                return self._held[shard]
        samples = self._read(shard)
        if len(samples) != self.lengths[shard]:
            raise JobFailedError(
                f"shard {shard} has {len(samples)} samples, not {self.lengths[shard]}",
                hint="The shard was changed after its length was read. Read the lengths again, and start a new run.",
            )
        with self._lock:
            self._held[shard] = samples
            while len(self._held) > self._keep:
                self._held.popitem(last=False)
        return samples


class Stream:
    """Samples that can only be read in order. `open(start)` yields the samples from number `start` on.

    Every rank reads the whole stream and keeps only its own part, so the stream must be the same on all ranks. The
    stream's length need not be known. When the stream ends, the next epoch begins with `open(0)`.
    """

    def __init__(self, open: Callable[[int], Iterator[Any]], *, fingerprint: str) -> None:
        self.open = open
        self.fingerprint = fingerprint


def length_of(source: Any) -> int | None:
    """Return the number of samples in one epoch; None for a stream.

    Raises:
        JobFailedError: the source is neither a stream nor an object with a length and numbered samples.
    """
    if isinstance(source, Stream):
        return None
    kind = type(source).__name__
    if not hasattr(type(source), "__getitem__"):
        raise JobFailedError(
            f"source: {kind} has no access to a sample by its number",
            hint="Wrap samples that can only be read in order: Stream(open, fingerprint=...); "
            "for a Hugging Face IterableDataset, open is `lambda start: iter(dataset.skip(start))`.",
        )
    try:
        # len() of a MosaicML StreamingDataset is only one rank's share; `num_samples` is the number on all ranks
        length = source.num_samples if hasattr(source, "shards") and hasattr(source, "num_samples") else len(source)
    except (TypeError, NotImplementedError) as error:
        raise JobFailedError(
            f"source: the length of {kind} is unknown: {error}",
            hint="Give it __len__, or wrap it: Stream(open, fingerprint=...).",
        ) from error
    return int(length)


def fingerprint_of(source: Any) -> str:
    """Return the fingerprint of a source: a hash of its attribute `fingerprint` or `_fingerprint`, or else of its type.

    The source's length is always part of the fingerprint.
    """
    own = getattr(source, "fingerprint", None) or getattr(source, "_fingerprint", None)
    kind = type(source)
    return f"{_digest(str(own or f'{kind.__module__}.{kind.__qualname__}'))}/{length_of(source)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
