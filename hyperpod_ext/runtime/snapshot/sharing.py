"""A word that states which other ranks hold the same state as a rank:

- `same`: data parallelism keeps the state equal on all ranks.
- `alike`: as `same`, except for parts that data parallelism does not keep equal, such as batch norm's statistics.
- `same:0,2` or `alike:0,2`: the state is shared by these ranks only, for example along HSDP's replicate dimension.
- `shard`: no other rank holds this state.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

from hyperpod_ext.errors import JobFailedError

_KINDS = ("same", "alike", "shard")


class Sharing(NamedTuple):
    """A parsed word for the sharing of state, such as `alike:0,2`."""

    kind: str
    ranks: frozenset[int] | None = None
    """Ranks that hold the same state; None: all ranks for `same` and `alike`, one rank for `shard`."""

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(cls, text: str) -> Sharing:
        """Parse a word for the sharing of state, such as `alike:0,2`.

        Raises:
            JobFailedError: the word for the sharing of state is unknown.
        """
        kind, _, ranks = text.partition(":")
        try:
            among = frozenset(int(rank) for rank in ranks.split(",")) if ranks else None
        except ValueError:
            among, kind = None, ""
        if kind not in _KINDS:
            raise JobFailedError(
                f"a snapshot has the unknown word {text!r} for the sharing of state; valid are `same`, `alike:0,2` and "
                "`shard`",
                hint="Upgrade hyperpod_ext in the container.",
            )
        return cls(kind, among)

    @classmethod
    def among(cls, kind: str, ranks: Collection[int] | None, world_size: int) -> Sharing:
        """Return the word for state that `ranks` share; `shard` if it is only one rank.

        Args:
            kind: `same` or `alike`.
            ranks: ranks that hold the state; None: all ranks.
            world_size: number of all ranks.
        """
        if ranks is None or len(ranks) == world_size:
            return cls(kind)
        return cls(kind, frozenset(ranks)) if len(ranks) > 1 else cls("shard")

    def __str__(self) -> str:
        return self.kind if self.ranks is None else f"{self.kind}:{','.join(map(str, sorted(self.ranks)))}"
