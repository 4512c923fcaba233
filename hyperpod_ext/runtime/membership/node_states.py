"""The states of a node, and how it may come from one to another. Pure.

    absent ──▶ spare ──▶ joining ──▶ member ◀─▶ departing ──▶ decommissioned ──▶ retained ──▶ released
      ▲          │                    ▲ │                         ▲                  │
      │          └────────────────────┘ └─────────────────────────┘                  └──▶ spare
      └── from any of them: the node is lost

Nothing else says what a node is: every change of state passes `NodeStates.set_state`, which refuses what the table does
not allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Self


class NodeState(Enum):
    ABSENT = "absent"
    """It has not come yet, or is lost."""
    SPARE = "spare"
    """It is healthy, and has no rank."""
    JOINING = "joining"
    """A spare whose workers are started for the next rank assignment, while the others train."""
    MEMBER = "member"
    """It has ranks."""
    DEPARTING = "departing"
    """It has ranks, and has asked to leave, or somebody wants them on another node."""
    DECOMMISSIONED = "decommissioned"
    """Its ranks are elsewhere. It ends its workers, and has yet to report what its memory holds."""
    RETAINED = "retained"
    """It has no rank, and its memory may still be needed."""
    RELEASED = "released"
    """The job needs nothing of it any more."""


class Why(Enum):
    """Why a node has to give up its ranks."""

    RESIZED = "resized"
    """The job goes on with fewer nodes."""
    ASKED = "asked"
    """It asked to leave, or its ranks are to move, as it will be taken away."""
    FAILED = "failed"
    """Its processes die again and again."""


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
"""States that may follow each. One that may follow itself is set again when the node asks to leave."""

WITH_RANKS = frozenset({_S.MEMBER, _S.DEPARTING})
HAD_RANKS = frozenset({_S.DECOMMISSIONED, _S.RETAINED})


class TransitionError(Exception):
    """A node cannot be in that state now: an error of ours."""


class NodeStates:
    """The state of every node, why it has to go if it has, and how often it was lost."""

    def __init__(
        self, members: Iterable[int] = (), spares: Iterable[int] = (), losses: Mapping[int, int] | None = None
    ) -> None:
        self._states = dict.fromkeys(members, _S.MEMBER) | dict.fromkeys(spares, _S.SPARE)
        self._why: dict[int, Why] = {}
        self.losses = dict(losses or {})
        """How often each node was lost, or given up."""

    @classmethod
    def known(
        cls,
        members: Iterable[int],
        spares: Iterable[int],
        retained: Iterable[int],
        asked: Iterable[int],
        losses: Mapping[int, int],
    ) -> Self:
        """Those that another coordinator has left behind. `asked`: of all of them, those that want to leave."""
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
        """`node` is in another state from now on. `why`: it has to go; what was said before stays true.

        Raises:
            TransitionError: it cannot be, from the state that it is in.
        """
        if state not in TRANSITIONS[before := self[node]]:
            raise TransitionError(f"node {node} is {before.value}, and cannot become {state.value}")
        self._states[node] = state
        if state in (_S.ABSENT, _S.SPARE, _S.MEMBER, _S.RELEASED):
            self._why.pop(node, None)
        elif why is not None:
            self._why[node] = why

    def lose(self, node: int) -> NodeState:
        """`node` is gone; returns what it was."""
        if (before := self[node]) is not _S.ABSENT:
            self.set_state(node, _S.ABSENT)
        return before

    def why(self, node: int) -> Why | None:
        """Why it has to go; None: it has not."""
        return self._why.get(node)

    def ask_to_leave(self, node: int) -> None:
        """It is to be released as soon as it is not needed."""
        self.set_state(node, _S.DEPARTING if self[node] is _S.MEMBER else self[node], Why.ASKED)

    def count_loss(self, node: int) -> None:
        self.losses[node] = self.losses.get(node, 0) + 1

    def those(self, *states: NodeState) -> set[int]:
        """Nodes that are in one of these states."""
        return {node for node, state in self._states.items() if state in states}

    @property
    def spares(self) -> set[int]:
        return self.those(_S.SPARE)

    @property
    def asked(self) -> set[int]:
        """Nodes that have asked to leave, and are still needed."""
        return {node for node, why in self._why.items() if why is Why.ASKED}

    @property
    def going(self) -> set[int]:
        """Nodes without a rank that are released once their memory is not needed: those that fail serve theirs on."""
        return {node for node, why in self._why.items() if why is not Why.FAILED and self[node] in HAD_RANKS}


@dataclass(slots=True)
class Retention:
    """Until which step memory may be needed: that of nodes that gave up their ranks, and on nodes that stay what ranks
    had by earlier numbers."""

    next_due: Callable[[int], int] = lambda step: step
    """The first step from one on that is saved to memory."""
    until: int | None = None
    """None: not known before all ranks have restored."""
    handed_on: bool = True
    """Whether new processes have ranks, and their state from there. A coordinator that cannot know takes it so."""
    moved: bool = False
    """Whether ranks have had other numbers, and what they had by those is held still."""
    saved_anew: int = 0
    """Once every rank has committed this step, each has saved by the number that it has."""

    def begin(self, *, handed_on: bool = True) -> None:
        """Nodes give up their ranks."""
        self.until, self.handed_on = None, handed_on

    def went_on(self, step: int, sharing: str) -> None:
        """All ranks go on after `step`.

        Args:
            sharing: how their states are related, as their snapshots say; empty: there are none.
        """
        self.saved_anew = self.next_due(step + 1) + 1
        if self.until is None:
            # what others do not have is safe once it has been saved where it is now; the step after that shows it
            others_have_it = sharing in ("", "same") or (sharing == "alike" and not self.handed_on)
            self.until = step if others_have_it else self.saved_anew

    def is_over(self, step: int) -> bool:
        """Whether it is not needed any more, now that every rank has committed `step`."""
        return self.until is not None and step >= self.until

    def is_unneeded(self, step: int) -> bool:
        """Whether what ranks had by earlier numbers is held for nothing, now that every rank has committed `step`."""
        return self.moved and step >= self.saved_anew
