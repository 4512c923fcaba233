"""The history of rank renumberings, for nodes that have missed some of them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

_REMEMBERED = 16


@dataclass(slots=True)
class Renumbering:
    """New numbers of ranks whose processes stayed, for the newest generations that began with a renumbering."""

    moves: dict[int, dict[int, int]] = field(default_factory=dict)
    """For each such generation, the new number of each rank, by its previous number."""

    def add(self, generation: int, moved: Mapping[int, int]) -> None:
        self.moves = {**dict(sorted(self.moves.items())[-_REMEMBERED:]), generation: dict(moved)}

    @property
    def newest(self) -> int:
        """Newest generation that began with a renumbering; 0 if there is none."""
        return max(self.moves, default=0)

    @property
    def last(self) -> dict[int, int]:
        """New rank numbers of generation `newest`, by previous number."""
        return self.moves.get(self.newest, {})

    def since(self, generation: int) -> dict[int, int] | None:
        """Return the current number of each rank of `generation` whose process stayed. None if no number changed
        since."""
        later = [moved for number, moved in sorted(self.moves.items()) if number > generation]
        if not later:
            return None
        together = later[0]
        for moved in later[1:]:
            together = {rank: moved[now] for rank, now in together.items() if now in moved}
        return together

    def rank_now(self, rank: int, generation: int) -> int | None:
        """Return the current number of a rank of `generation`; None if the rank no longer has a number."""
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
    """Convert a map between rank numbers to JSON, whose keys must be strings."""
    return {str(rank): now for rank, now in moved.items()}
