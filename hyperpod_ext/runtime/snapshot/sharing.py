"""Whose state serves whom: what a rank says of how its state relates to the others'. Pure.

Said in one word, with the ranks it holds for where that is not all of them:

- `same`: as data parallelism keeps it, equal on every rank;
- `alike`: that, but with parts that no one keeps equal, such as batch norm's statistics;
- `same:0,2`, `alike:0,2`: so on these ranks only, as along HSDP's replicate dimension;
- `shard`: a part that no other rank has.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

from hyperpod_ext.errors import JobFailedError

_KINDS = ("same", "alike", "shard")


class Sharing(NamedTuple):
    """What the word says."""

    kind: str
    ranks: frozenset[int] | None = None
    """Ranks that hold this part; None: all of them (`same`, `alike`), or just one (`shard`)."""

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(cls, text: str) -> Sharing:
        """Read the word.

        Raises:
            JobFailedError: it is not one of them.
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
        """`kind` among `ranks`, of a world of so many; None: all of them."""
        if ranks is None or len(ranks) == world_size:
            return cls(kind)
        return cls(kind, frozenset(ranks)) if len(ranks) > 1 else cls("shard")

    def __str__(self) -> str:
        return self.kind if self.ranks is None else f"{self.kind}:{','.join(map(str, sorted(self.ranks)))}"
