"""Ranks that a job goes on without until others take their places (`restart.policy: continue`). Pure.

    whole ──ranks are lost──▶ short: the others have numbers without gaps ──replacements are ready──▶ whole
                                 ▲ │ more are lost
                                 └─┘

Places are those of the whole world: a node for each block of ranks. While ranks are missing the others fill the gaps
in their numbers, the highest first. A joining process never gets a number that a process of its node has now, so that
a node can tell the two apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.runtime.membership.node_states import WITH_RANKS, NodeState, NodeStates
from hyperpod_ext.runtime.membership.rank_assignment import blocks_of


@dataclass(frozen=True, slots=True)
class Renumbered:
    """Ranks under other numbers."""

    after: Mapping[int, int]
    """Node of each rank."""
    moved: Mapping[int, int]
    """New number of each rank whose process stays."""


@dataclass(frozen=True, slots=True)
class Refill(Renumbered):
    """The world with as many of the missing ranks as there are nodes for."""

    joining: Mapping[int, int]
    """Node of each rank whose process is new."""
    places: tuple[int, ...]
    """Node of each block of the whole world; of one that none is there for, the node that it had."""
    complete: bool


@dataclass(slots=True)
class Continuing:
    """Whether the job goes on without lost ranks, and which places are empty."""

    enabled: bool = False
    places: list[int] = field(default_factory=list)
    """Node of each block of the whole world, while ranks are missing; empty: all are there."""
    gave_up: bool = False
    """Whether replacements died again and again before they were ready; the next fault or node begins anew."""

    @property
    def is_short(self) -> bool:
        """Whether ranks are missing."""
        return bool(self.places)

    def can_do_without(self, nodes: Mapping[int, int], lost: Collection[int]) -> bool:
        """Whether any rank is left. `nodes`: of each rank."""
        return self.enabled and bool(nodes.keys() - set(lost))

    def lose(self, nodes: Mapping[int, int], lost: Collection[int], each: int) -> Renumbered:
        """Go on without these ranks. `each`: ranks of a node in the whole world."""
        if not self.places:
            self.places = blocks_of(nodes, each)
        self.gave_up = False
        return without(nodes, lost)

    def refill(self, nodes: Mapping[int, int], states: NodeStates, each: int) -> Refill | None:
        """How missing ranks come back; None: there is no node for any of them, or it has been tried enough."""
        return None if self.gave_up else refill(nodes, self.places, states, each)

    def give(self, lost: int, node: int) -> None:
        """Another node, which may have come back to an empty place, has the ranks that are left of a lost one."""
        swapped = {lost: node, node: lost}
        self.places = [swapped.get(place, place) for place in self.places]

    def filled(self, made: Refill) -> None:
        """Ranks have come back."""
        self.places = [] if made.complete else list(made.places)

    def size(self, nodes: Mapping[int, int], each: int) -> int:
        """Ranks of the whole world."""
        return len(self.places) * each or len(nodes)

    def to_json(self, states: NodeStates, nodes: Mapping[int, int]) -> dict[str, Any]:
        """`idle`: nodes that are there, and all of whose ranks are missing."""
        idle = {place for place in self.places if states[place] in WITH_RANKS} - set(nodes.values())
        return {"places": list(self.places), "idle": sorted(idle)} if self.places else {}


def without(nodes: Mapping[int, int], lost: Collection[int]) -> Renumbered:
    """The ranks that are left, numbered without gaps: those of high numbers fill them."""
    left = sorted(nodes.keys() - set(lost))
    count = len(left)
    gaps = iter(sorted(set(range(count)) - set(left)))
    moved = {rank: rank if rank < count else next(gaps) for rank in left}
    after = {now: nodes[rank] for rank, now in moved.items()}
    return Renumbered(dict(sorted(after.items())), moved)


def refill(nodes: Mapping[int, int], places: Collection[int], states: NodeStates, each: int) -> Refill | None:
    """Processes for the empty places: on the node that had them, or else on spares. None: no node is there for any.

    Once no place is empty each node has a block of ranks in a row again. Before, ranks that come back get the next
    numbers.
    """
    found, complete = _nodes_for(places, states)
    on: dict[int, list[int]] = {}
    for rank, node in nodes.items():
        on.setdefault(node, []).append(rank)
    moved, joining = dict[int, int](), dict[int, int]()
    following = len(nodes)
    for block, place in enumerate(found):
        if place is None:
            continue
        node, here = place, sorted(on.get(place, ()))
        missing = each - len(here)
        if complete:
            own = range(block * each, (block + 1) * each)
            free = iter(number for number in own if number not in here)
            moved |= {rank: rank if rank in own else next(free) for rank in here}
            new = list(free)
        else:
            moved |= {rank: rank for rank in here}
            new = list(range(following, following + missing))
            following += missing
        joining |= dict.fromkeys(new, node)
    if not joining:
        return None
    after = {now: nodes[rank] for rank, now in moved.items()} | joining
    kept = tuple(had if node is None else node for had, node in zip(places, found, strict=True))
    return Refill(dict(sorted(after.items())), moved, joining, kept, complete)


def _nodes_for(places: Collection[int], states: NodeStates) -> tuple[list[int | None], bool]:
    """The node of each place: the one that had it, or a spare, or None. And whether all have one."""
    there = {place for place in places if states[place] in WITH_RANKS or states[place] is NodeState.SPARE}
    spares = iter(sorted(states.spares - there))
    found = [place if place in there else next(spares, None) for place in places]
    return found, None not in found
