"""Derives node numbers from the ranks' reports, for jobs without agents. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a job. Nodes are numbered in the order of their lowest ranks."""

    node_of: dict[int, int]
    """Node of each rank."""
    places: tuple[str, ...]
    """Name of the machine of each node. Several nodes may run on one machine."""

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> Nodes:
        """Number the nodes in the order of their lowest ranks. `ranks`: machine (`place`) and torchrun's node number
        (`node`) of each rank."""
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
        """Return the rank that sends messages on behalf of `node`: the lowest rank on the node."""
        return min(self.ranks(node))

    def index(self, node: int) -> int:
        """Return the index of `node` among the nodes on the same machine. The index is 0 unless several nodes share the
        machine."""
        return self.places[:node].count(self.places[node])
