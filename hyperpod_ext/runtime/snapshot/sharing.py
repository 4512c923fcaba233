"""Relation of a rank's state to the other ranks' states. Pure.

One word, followed by the ranks unless it holds for all:

- `same`: kept equal on every rank by data parallelism;
- `alike`: the same, except for parts that nothing keeps equal, such as batch norm's statistics;
- `same:0,2`, `alike:0,2`: on these ranks only, for example along HSDP's replicate dimension;
- `shard`: a part that no other rank has.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

from hyperpod_ext.errors import JobFailedError

_KINDS = ("same", "alike", "shard")


class Sharing(NamedTuple):
    """The parsed word."""

    kind: str
    ranks: frozenset[int] | None = None
    """Ranks that hold this part; None: all of them (`same`, `alike`), or just one (`shard`)."""

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(cls, text: str) -> Sharing:
        """Parse the word.

        Raises:
            JobFailedError: unknown word.
        """
        kind, _, ranks = text.partition(":")
        try:
            among = frozenset(int(rank) for rank in ranks.split(",")) if ranks else None
        except ValueError:
            among, kind = None, ""
        if kind not in _KINDS:
            raise JobFailedError(f"{text!r} does not say how state is shared; `same`, `alike:0,2` and `shard` would")
        return cls(kind, among)

    @classmethod
    def among(cls, kind: str, ranks: Collection[int] | None, world_size: int) -> Sharing:
        """Return `kind` among `ranks`; None: all ranks."""
        if ranks is None or len(ranks) == world_size:
            return cls(kind)
        return cls(kind, frozenset(ranks)) if len(ranks) > 1 else cls("shard")

    def __str__(self) -> str:
        return self.kind if self.ranks is None else f"{self.kind}:{','.join(map(str, sorted(self.ranks)))}"
