"""Finds one step after which all ranks can stop together. Pure functions.

    asked ──all can──▶ agreed ──all have stopped──▶ reached
      ▲ │ some rank is past that step, or has not begun its loop
      └─┘ asked again, for a later step

`control_plane/stop_at_step.py` contains the code that runs in each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Answer(Enum):
    """State of the agreement on a common stop, after an answer of one rank."""

    WAIT = "wait"
    """Some ranks have not answered yet, so the coordinator waits."""
    AGREED = "agreed"
    """All ranks can stop after the requested step."""
    ASK_AGAIN = "ask again"
    """A rank is past the requested step, so a later step must be requested."""
    ASK_LATER = "ask later"
    """A rank has not begun its training loop, so the request must be repeated after a short wait."""
    ENDING = "ending"
    """A rank makes no more steps, because the job is about to end."""


@dataclass(slots=True)
class StopAgreement:
    """Agreement of all ranks on one step after which all of them stop."""

    ranks: int
    """Number of ranks that must agree."""
    ahead: int
    """Number of steps from the newest committed step to the requested step. The number is doubled each time that a rank
    was already past the requested step."""
    farthest: int
    """Largest value of `ahead`."""
    number: int = 0
    """Number of the latest stop request; 0 before the first request."""
    agreed: bool = False
    _answers: dict[int, tuple[bool, int]] = field(default_factory=dict)
    """Answer of each rank: whether the rank can stop after the requested step, and the step that the rank is
    computing."""
    _stopped: set[int] = field(default_factory=set)

    def ask(self, number: int, newest: int) -> int:
        """Begin stop request `number`. Returns the step after which all ranks should stop. `newest`: newest step that
        any rank has committed."""
        step = max([newest, *(making for _, making in self._answers.values())]) + self.ahead
        self.number, self.agreed, self._answers, self._stopped = number, False, {}, set()
        return step

    def answered(self, rank: int, number: int, can: bool, making: int, over: bool) -> Answer:
        """Record the answer of `rank` to stop request `number`.

        can: whether the rank can stop after the requested step.
        making: step that the rank is computing; negative before its training loop has begun.
        over: whether the rank makes no more steps.
        """
        if number != self.number:
            return Answer.WAIT
        if over:
            return Answer.ENDING
        self._answers[rank] = can, making
        if len(self._answers) < self.ranks:
            return Answer.WAIT
        if all(can for can, _ in self._answers.values()):
            self.agreed = True
            return Answer.AGREED
        if any(making < 0 for _, making in self._answers.values()):
            return Answer.ASK_LATER
        self.ahead = min(2 * self.ahead, self.farthest)
        return Answer.ASK_AGAIN

    def stopped(self, rank: int, number: int) -> bool:
        """Record that `rank` has stopped after the agreed step and has saved its state. Returns whether all ranks have
        stopped."""
        if number != self.number or not self.agreed:
            return False
        self._stopped.add(rank)
        return len(self._stopped) == self.ranks
