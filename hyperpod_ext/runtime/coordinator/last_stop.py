"""Where the ranks of a job that is told to end stop and save, where not each step is saved. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_FARTHEST = 1024
"""Steps ahead of the newest; quick ones are made faster than ranks can be asked."""


@dataclass(slots=True)
class LastStop:
    """All ranks stop after the same step, as far as all are asked in time. See `control_plane/stop_at_step.py`."""

    ranks: int
    since: float
    """When the job was told to end."""
    number: int = 0
    """Of the question; those that have to do with other worlds count from 1."""
    _ahead: int = 1
    _answers: dict[int, tuple[bool, int]] = field(default_factory=dict)
    _standing: set[int] = field(default_factory=set)

    def ask(self, newest: int) -> dict[str, int]:
        """A question to all, with the step: the one that is made now, and later ones where some were past it."""
        step = max([newest, *(at for _, at in self._answers.values())]) + self._ahead
        self.number, self._answers = self.number - 1, {}
        self._ahead = min(2 * self._ahead, _FARTHEST)
        return {"number": self.number, "step": step}

    def hear(
        self, rank: int, message: Mapping[str, Any]
    ) -> Literal["", "all can", "ask again", "ask later", "all stand"]:
        """An answer, or that a rank stands; a rank that makes no more steps saves the last one by itself."""
        if int(message["number"]) != self.number:
            return ""
        if message["type"] == "halted":
            self._standing.add(rank)
            return "all stand" if len(self._standing) == self.ranks else ""
        if message["over"]:
            return ""
        self._answers[rank] = bool(message["can"]), int(message["at"])
        if len(self._answers) < self.ranks:
            return ""
        if all(can for can, _ in self._answers.values()):
            return "all can"
        return "ask later" if any(at < 0 for _, at in self._answers.values()) else "ask again"
