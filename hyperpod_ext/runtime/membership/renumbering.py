"""Which ranks got other numbers, in which generation. For nodes that have missed some of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

_REMEMBERED = 16


@dataclass(slots=True)
class Renumbering:
    """New numbers of the ranks whose processes stayed, by the generation that began with them; the newest few."""

    moves: dict[int, dict[int, int]] = field(default_factory=dict)

    def add(self, generation: int, moved: Mapping[int, int]) -> None:
        self.moves = {**dict(sorted(self.moves.items())[-_REMEMBERED:]), generation: dict(moved)}

    @property
    def newest(self) -> int:
        """Generation in which ranks last got other numbers; 0: never."""
        return max(self.moves, default=0)

    @property
    def last(self) -> dict[int, int]:
        """What changed in that generation."""
        return self.moves.get(self.newest, {})

    def since(self, generation: int) -> dict[int, int] | None:
        """New number of each rank of `generation` whose process stays; None: all have theirs still."""
        later = [moved for number, moved in sorted(self.moves.items()) if number > generation]
        if not later:
            return None
        together = later[0]
        for moved in later[1:]:
            together = {rank: moved[now] for rank, now in together.items() if now in moved}
        return together

    def rank_now(self, rank: int, generation: int) -> int | None:
        """Number that a rank of `generation` has now; None: it has none any more."""
        moved = self.since(generation)
        return rank if moved is None else moved.get(rank)

    def to_json(self) -> dict[str, Any]:
        return {str(generation): numbers_json(moved) for generation, moved in self.moves.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            {
                int(generation): {int(rank): int(now) for rank, now in moved.items()}
                for generation, moved in data.items()
            }
        )


def numbers_json(moved: Mapping[int, int]) -> dict[str, int]:
    """New numbers by old ones, as JSON has them."""
    return {str(rank): now for rank, now in moved.items()}
