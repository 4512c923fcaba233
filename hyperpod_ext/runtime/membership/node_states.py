"""The states of a node, and the allowed transitions between these states. Pure functions.

    absent ──▶ spare ──▶ joining ──▶ member ◀─▶ departing ──▶ decommissioned ──▶ retained ──▶ released
      ▲          │                    ▲ │                         ▲                  │
      │          └────────────────────┘ └─────────────────────────┘                  └──▶ spare
      └── from any of them: the node is lost

`NodeStates.set_state` makes every change of state, and refuses transitions that `TRANSITIONS` does not list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Self


class NodeState(Enum):
    ABSENT = "absent"
    """A node that has not joined yet, or is lost."""
    SPARE = "spare"
    """A healthy node without ranks, which is ready to take over ranks."""
    JOINING = "joining"
    """A former spare that starts workers for the next rank assignment, while the current ranks train."""
    MEMBER = "member"
    """A node with ranks."""
    DEPARTING = "departing"
    """A node that will lose its ranks, because the node has requested to leave or a user has ordered to move its
    ranks."""
    DECOMMISSIONED = "decommissioned"
    """A node whose ranks are now on other nodes, but which must still end its workers and report the snapshots in its
    memory."""
    RETAINED = "retained"
    """A node without ranks that stays in the job, because the snapshots in its memory may still be needed."""
    RELEASED = "released"
    """A node that the job no longer needs."""


class Why(Enum):
    """Why a node must give up its ranks."""

    RESIZED = "resized"
    """The job continues with fewer nodes."""
    ASKED = "asked"
    """The node will be removed, because it has requested to leave or a user has ordered to move its ranks."""
    FAILED = "failed"
    """Processes on the node have died repeatedly."""


_S = NodeState
TRANSITIONS: Mapping[NodeState, frozenset[NodeState]] = {
    _S.ABSENT: frozenset({_S.SPARE, _S.MEMBER, _S.RELEASED}),
    _S.SPARE: frozenset({_S.JOINING, _S.MEMBER, _S.RELEASED, _S.ABSENT}),
    _S.JOINING: frozenset({_S.SPARE, _S.MEMBER, _S.ABSENT}),
    _S.MEMBER: frozenset({_S.DEPARTING, _S.DECOMMISSIONED, _S.ABSENT}),
    _S.DEPARTING: frozenset({_S.MEMBER, _S.DECOMMISSIONED, _S.ABSENT}),
    _S.DECOMMISSIONED: frozenset({_S.DECOMMISSIONED, _S.RETAINED, _S.ABSENT}),
    _S.RETAINED: frozenset({_S.RETAINED, _S.SPARE, _S.RELEASED, _S.ABSENT}),
    _S.RELEASED: frozenset({_S.SPARE, _S.ABSENT}),
}
"""The states that may follow each state. A state that may follow itself is set again when the node requests to
leave."""

WITH_RANKS = frozenset({_S.MEMBER, _S.DEPARTING})
HAD_RANKS = frozenset({_S.DECOMMISSIONED, _S.RETAINED})


class TransitionError(Exception):
    """Raised for a change of state that `TRANSITIONS` does not list, which is a bug in this package."""


class NodeStates:
    """The state of every node, why nodes must leave, and how often each node was lost."""

    def __init__(
        self, members: Iterable[int] = (), spares: Iterable[int] = (), losses: Mapping[int, int] | None = None
    ) -> None:
        self._states = dict.fromkeys(members, _S.MEMBER) | dict.fromkeys(spares, _S.SPARE)
        self._why: dict[int, Why] = {}
        self.losses = dict(losses or {})
        """How often each node was lost, or was decommissioned because of faults."""

    @classmethod
    def known(
        cls,
        members: Iterable[int],
        spares: Iterable[int],
        retained: Iterable[int],
        asked: Iterable[int],
        losses: Mapping[int, int],
    ) -> Self:
        """Create the node states from the job state of a former coordinator. `asked`: nodes that have requested to
        leave the job."""
        states = cls(members, spares, losses)
        asked = set(asked)
        for node in asked & states._states.keys():
            if states[node] is _S.MEMBER:
                states.set_state(node, _S.DEPARTING, Why.ASKED)
        for node in retained:
            states._states[node] = _S.RETAINED
            states._why[node] = Why.ASKED if node in asked else Why.RESIZED
        return states

    def __getitem__(self, node: int) -> NodeState:
        return self._states.get(node, _S.ABSENT)

    def set_state(self, node: int, state: NodeState, why: Why | None = None) -> None:
        """Change the state of `node`.

        Args:
            why: why the node must give up its ranks; None to keep an earlier reason.

        Raises:
            TransitionError: `state` may not follow the node's current state.
        """
        if state not in TRANSITIONS[before := self[node]]:
            raise TransitionError(f"node {node} is {before.value}, and cannot become {state.value}")
        self._states[node] = state
        if state in (_S.ABSENT, _S.SPARE, _S.MEMBER, _S.RELEASED):
            self._why.pop(node, None)
        elif why is not None:
            self._why[node] = why

    def lose(self, node: int) -> NodeState:
        """Mark `node` as absent, and return the node's former state."""
        if (before := self[node]) is not _S.ABSENT:
            self.set_state(node, _S.ABSENT)
        return before

    def why(self, node: int) -> Why | None:
        """Return why `node` must give up its ranks; None if the node keeps its ranks."""
        return self._why.get(node)

    def ask_to_leave(self, node: int) -> None:
        """Record that `node` must be released as soon as the job does not need the node any more."""
        self.set_state(node, _S.DEPARTING if self[node] is _S.MEMBER else self[node], Why.ASKED)

    def count_loss(self, node: int) -> None:
        self.losses[node] = self.losses.get(node, 0) + 1

    def those(self, *states: NodeState) -> set[int]:
        """Return the nodes whose state is one of `states`."""
        return {node for node, state in self._states.items() if state in states}

    @property
    def spares(self) -> set[int]:
        return self.those(_S.SPARE)

    @property
    def asked(self) -> set[int]:
        """Nodes that have requested to leave the job, but stay as long as the job needs them."""
        return {node for node, why in self._why.items() if why is Why.ASKED}

    @property
    def going(self) -> set[int]:
        """Nodes without ranks that are released once the job no longer needs their snapshots. Nodes that were
        decommissioned because of faults are not included: they are not released, and continue to serve snapshots."""
        return {node for node, why in self._why.items() if why is not Why.FAILED and self[node] in HAD_RANKS}


@dataclass(slots=True)
class Retention:
    """Decides how long old snapshots are kept after a new rank assignment. Old snapshots are on nodes that have given
    up their ranks, or were saved under earlier rank numbers."""

    next_due: Callable[[int], int] = lambda step: step
    """Function that returns the first step at or after a given step that is saved to memory."""
    until: int | None = None
    """Step that every rank must commit before nodes without ranks are released; None before all ranks of the new
    assignment have restored their state."""
    handed_on: bool = True
    """Whether ranks moved to new processes, which get their state from the nodes that gave up these ranks; True if
    unknown."""
    moved: bool = False
    """Whether snapshots under earlier rank numbers are still in memory."""
    saved_anew: int = 0
    """Step that every rank must commit before every rank has a snapshot under its current rank number."""

    def begin(self, *, handed_on: bool = True) -> None:
        """Start to keep old snapshots, because some nodes give up their ranks."""
        self.until, self.handed_on = None, handed_on

    def went_on(self, step: int, sharing: str) -> None:
        """Compute until which steps old snapshots must be kept. Called when all ranks have restored the state of
        `step`.

        Args:
            sharing: relation between the states of different ranks (`same`, `alike` or `shard`); empty if no snapshot
                exists.
        """
        self.saved_anew = self.next_due(step + 1) + 1
        if self.until is None:
            # keep state that only one rank has until the rank's new node has saved this state
            others_have_it = sharing in ("", "same") or (sharing == "alike" and not self.handed_on)
            self.until = step if others_have_it else self.saved_anew

    def is_over(self, step: int) -> bool:
        """Return whether nodes without ranks can be released once every rank has committed `step`."""
        return self.until is not None and step >= self.until

    def is_unneeded(self, step: int) -> bool:
        """Return whether snapshots under earlier rank numbers can be released once every rank has committed `step`."""
        return self.moved and step >= self.saved_anew
