"""Keeps the history of changes of rank numbers, for nodes that were disconnected during a change. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

_REMEMBERED = 16


@dataclass(slots=True)
class Renumbering:
    """The new rank numbers of processes that stayed, for the 17 newest generations with new rank numbers."""

    moves: dict[int, dict[int, int]] = field(default_factory=dict)
    """For each generation that began with new rank numbers, a map from previous to new rank numbers."""

    def add(self, generation: int, moved: Mapping[int, int]) -> None:
        self.moves = {**dict(sorted(self.moves.items())[-_REMEMBERED:]), generation: dict(moved)}

    @property
    def newest(self) -> int:
        """Newest generation that began with new rank numbers; 0 if ranks were never renumbered."""
        return max(self.moves, default=0)

    @property
    def last(self) -> dict[int, int]:
        """Map from previous to new rank numbers in the generation `newest`."""
        return self.moves.get(self.newest, {})

    def since(self, generation: int) -> dict[int, int] | None:
        """Return a map from rank numbers in `generation` to current rank numbers, for processes that stayed. Returns
        None if rank numbers have not changed since `generation`."""
        later = [moved for number, moved in sorted(self.moves.items()) if number > generation]
        if not later:
            return None
        together = later[0]
        for moved in later[1:]:
            together = {rank: moved[now] for rank, now in together.items() if now in moved}
        return together

    def rank_now(self, rank: int, generation: int) -> int | None:
        """Return the current rank number of the process that had number `rank` in `generation`; None if the process no
        longer has a rank."""
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
    """Convert a map between rank numbers to a JSON object, whose keys must be strings."""
    return {str(rank): now for rank, now in moved.items()}
