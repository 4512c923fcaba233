"""Makes a job continue to train without lost ranks until replacements are ready (`restart.policy: continue`). Pure
functions.

    full ──ranks are lost──▶ short: the remaining ranks are renumbered without gaps ──replacements are ready──▶ full
                                ▲ │ more are lost
                                └─┘

In this module, a place is a block of consecutive ranks in the full-size job, together with the node to which the block
belongs. While ranks are missing, the processes with the highest rank numbers take the numbers of the missing ranks. A
new process never gets a rank number that another process on the same node has now, so that the node's agent can
distinguish these processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.runtime.membership.node_states import WITH_RANKS, NodeState, NodeStates
from hyperpod_ext.runtime.membership.rank_assignment import blocks_of


@dataclass(frozen=True, slots=True)
class Renumbered:
    """A rank assignment in which some remaining processes have a new rank number."""

    after: Mapping[int, int]
    """Node of each rank."""
    moved: Mapping[int, int]
    """Maps the old rank number of each remaining process to its new rank number."""


@dataclass(frozen=True, slots=True)
class Refill(Renumbered):
    """A rank assignment in which as many missing ranks return as there are nodes for them."""

    joining: Mapping[int, int]
    """Node of the new process of each rank that gets a new process."""
    places: tuple[int, ...]
    """Node of each block of ranks in the full-size job; for a block without a node now, the node that had the block
    last."""
    complete: bool
    """Whether no rank is missing in this assignment."""


@dataclass(slots=True)
class Continuing:
    """Tracks whether the job may continue without lost ranks, and the node to which each block of missing ranks
    belongs."""

    enabled: bool = False
    places: list[int] = field(default_factory=list)
    """While ranks are missing, the node of each block of ranks in the full-size job; empty if no rank is missing."""
    gave_up: bool = False
    """Whether no replacement processes are started, because they have repeatedly died before they were ready. The next
    fault or the next new node sets `gave_up` to False."""

    @property
    def is_short(self) -> bool:
        """Whether some ranks are missing."""
        return bool(self.places)

    def can_do_without(self, nodes: Mapping[int, int], lost: Collection[int]) -> bool:
        """Return whether the job may continue without the ranks in `lost`. At least one rank must remain. `nodes`: node
        of each rank."""
        return self.enabled and bool(nodes.keys() - set(lost))

    def lose(self, nodes: Mapping[int, int], lost: Collection[int], each: int) -> Renumbered:
        """Remove the ranks in `lost`, and renumber the remaining ranks. `each`: number of ranks per node in the
        full-size job."""
        if not self.places:
            self.places = blocks_of(nodes, each)
        self.gave_up = False
        return without(nodes, lost)

    def refill(self, nodes: Mapping[int, int], states: NodeStates, each: int) -> Refill | None:
        """Plan new processes for missing ranks. Returns None if no node is free for a missing rank, or if too many
        attempts have failed."""
        return None if self.gave_up else refill(nodes, self.places, states, each)

    def give(self, lost: int, node: int) -> None:
        """Swap two nodes in `places`, because `node` takes over the remaining ranks of the lost node."""
        swapped = {lost: node, node: lost}
        self.places = [swapped.get(place, place) for place in self.places]

    def filled(self, made: Refill) -> None:
        """Record that the new processes of the plan `made` have begun to train."""
        self.places = [] if made.complete else list(made.places)

    def size(self, nodes: Mapping[int, int], each: int) -> int:
        """Return the number of ranks in the full-size job."""
        return len(self.places) * each or len(nodes)

    def to_json(self, states: NodeStates, nodes: Mapping[int, int]) -> dict[str, Any]:
        """Return the part of the job state that describes missing ranks. Field `idle` lists the connected nodes all of
        whose ranks are missing."""
        idle = {place for place in self.places if states[place] in WITH_RANKS} - set(nodes.values())
        return {"places": list(self.places), "idle": sorted(idle)} if self.places else {}


def without(nodes: Mapping[int, int], lost: Collection[int]) -> Renumbered:
    """Return an assignment of the remaining ranks, renumbered without gaps: the highest ranks get the numbers of lost
    ranks."""
    left = sorted(nodes.keys() - set(lost))
    count = len(left)
    gaps = iter(sorted(set(range(count)) - set(left)))
    moved = {rank: rank if rank < count else next(gaps) for rank in left}
    after = {now: nodes[rank] for rank, now in moved.items()}
    return Renumbered(dict(sorted(after.items())), moved)


def refill(nodes: Mapping[int, int], places: Collection[int], states: NodeStates, each: int) -> Refill | None:
    """Plan new processes for the missing ranks, on the node that had these ranks or on a spare. Returns None if no node
    is free.

    If all missing ranks return, each node has a block of consecutive ranks again. If only some missing ranks return,
    the returning ranks get the next free rank numbers.
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
    """Return the node for each block of ranks (the block's former node, a spare, or None), and whether every block has
    a node."""
    there = {place for place in places if states[place] in WITH_RANKS or states[place] is NodeState.SPARE}
    spares = iter(sorted(states.spares - there))
    found = [place if place in there else next(spares, None) for place in places]
    return found, None not in found
