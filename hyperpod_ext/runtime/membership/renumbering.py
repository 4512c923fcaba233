"""The history of new numbers of ranks, for nodes that have missed some of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

_REMEMBERED = 16


@dataclass(slots=True)
class Renumbering:
    """New numbers of ranks whose processes stayed, for the newest generations that began with new numbers."""

    moves: dict[int, dict[int, int]] = field(default_factory=dict)
    """By generation: the new number of each rank, by its number before."""

    def add(self, generation: int, moved: Mapping[int, int]) -> None:
        self.moves = {**dict(sorted(self.moves.items())[-_REMEMBERED:]), generation: dict(moved)}

    @property
    def newest(self) -> int:
        """Newest generation that began with new numbers; 0 if none did."""
        return max(self.moves, default=0)

    @property
    def last(self) -> dict[int, int]:
        """New numbers of the generation `newest`, by the numbers before."""
        return self.moves.get(self.newest, {})

    def since(self, generation: int) -> dict[int, int] | None:
        """Return the current number of each rank of `generation` whose process stayed; None if no number changed."""
        later = [moved for number, moved in sorted(self.moves.items()) if number > generation]
        if not later:
            return None
        together = later[0]
        for moved in later[1:]:
            together = {rank: moved[now] for rank, now in together.items() if now in moved}
        return together

    def rank_now(self, rank: int, generation: int) -> int | None:
        """Return the current number of a rank of `generation`; None if it has none any more."""
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
    """Convert a map between numbers to JSON, whose keys are strings."""
    return {str(rank): now for rank, now in moved.items()}
