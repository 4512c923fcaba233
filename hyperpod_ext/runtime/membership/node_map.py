"""Which rank is on which node. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes are numbered in the order of their first rank."""

    node_of: dict[int, int]
    """Node of each rank."""
    places: tuple[str, ...]
    """Machine of each node."""

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> Nodes:
        """From what each rank says of itself: its `place`, and the `node` that torchrun has put it on."""
        numbers: dict[tuple[str, str | None], int] = {}
        node_of = {
            rank: numbers.setdefault((str(each["place"]), each["node"]), len(numbers))
            for rank, each in enumerate(ranks)
        }
        return cls(node_of, tuple(place for place, _ in numbers))

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def machines(self) -> int:
        return len(set(self.places))

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, on in self.node_of.items() if on == node]

    def leader(self, node: int) -> int:
        """The rank that speaks for its node."""
        return min(self.ranks(node))

    def index(self, node: int) -> int:
        """Which of the nodes on its machine this is: 0, but where one machine plays several."""
        return self.places[:node].count(self.places[node])
