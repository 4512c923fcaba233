"""The step after which all ranks stop together: asked for, agreed on, reached. Pure.

    asked ──all can──▶ agreed ──all have stopped──▶ reached
      ▲ │ some rank is past that step, or has not begun its loop
      └─┘ asked again, for a later step

See `control_plane/stop_at_step.py` for a rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Answer(Enum):
    """What follows from a rank's answer."""

    WAIT = "wait"
    """For the others."""
    AGREED = "agreed"
    """All ranks can stop there."""
    ASK_AGAIN = "ask again"
    """Some rank is past that step: ask for a later one."""
    ASK_LATER = "ask later"
    """Some rank has not begun its loop: ask in a moment."""
    ENDING = "ending"
    """Some rank makes no more steps."""


@dataclass(slots=True)
class StopAgreement:
    """One stop of all ranks.

    `ahead`: how many steps after the newest ranks are asked to stop; twice as many each time that one was past it.
    """

    ranks: int
    ahead: int
    farthest: int
    number: int = 0
    """Of the question; 0: not asked yet."""
    agreed: bool = False
    _answers: dict[int, tuple[bool, int]] = field(default_factory=dict)
    """Of each rank: whether it can stop there, and which step it makes."""
    _stopped: set[int] = field(default_factory=set)

    def ask(self, number: int, newest: int) -> int:
        """Ask all ranks, under this number; returns the step to ask for. `newest`: that any rank has made."""
        step = max([newest, *(making for _, making in self._answers.values())]) + self.ahead
        self.number, self.agreed, self._answers, self._stopped = number, False, {}, set()
        return step

    def answered(self, rank: int, number: int, can: bool, making: int, over: bool) -> Answer:
        """`rank`, which makes step `making`, can stop or not. `over`: it makes no more steps."""
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
        """`rank` has stopped at the step that was agreed on, and has saved. Returns whether all have."""
        if number != self.number or not self.agreed:
            return False
        self._stopped.add(rank)
        return len(self._stopped) == self.ranks
