"""The node of each rank, for jobs without agents. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a job, numbered in the order of their lowest ranks."""

    node_of: dict[int, int]
    """Node of each rank."""
    places: tuple[str, ...]
    """Machine of each node; several nodes may share one."""

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> Nodes:
        """Number the nodes. `ranks`: for each rank, its machine (`place`) and its node number from torchrun
        (`node`)."""
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
        """Return the rank that sends messages for its node, which is the node's lowest rank."""
        return min(self.ranks(node))

    def index(self, node: int) -> int:
        """Return the index of a node among the nodes on the same machine, which is 0 unless several nodes share a
        machine."""
        return self.places[:node].count(self.places[node])
