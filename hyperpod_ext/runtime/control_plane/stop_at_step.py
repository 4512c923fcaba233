"""Where this rank stops so that the job can go on as another world: asked for ahead, so that all stop after one step.

The coordinator asks every rank whether it can still stop after a step; a rank that can waits there, and only there,
for the word whether all can. So no rank is ever in a collective that another one has left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hyperpod_ext.runtime.ipc.control_messages import RankStopped, StopAnswer

Tell = Callable[[StopAnswer | RankStopped], None]


class StopAtStep:
    """Asked from the thread that listens, passed by the main one.

    Args:
        tell: takes this rank's answers.
    """

    ends = False
    """Whether processes end where they halt, so that only what is saved survives it."""

    def __init__(self, tell: Tell = lambda report: None) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._making = -1
        """Step that is made, or made next; -1: none yet."""
        self._total = 0
        self._number = 0
        self._stop: int | None = None
        self._agreed = False
        self._over = False

    # --- from the thread that listens ------------------------------------------------------------

    def ask(self, number: int, step: int, *, ends: bool = False) -> None:
        """Can this rank stop after `step`? `ends`: for good."""
        with self._changed:
            over = self._making >= 0 and step >= self._total
            can = not over and not self._over and 0 <= self._making <= step
            self._number, self._agreed, self.ends = number, False, ends
            self._stop = step if can else None
            self._changed.notify_all()
            self._tell(StopAnswer(number=number, can=can, at=self._making, over=over))

    def agree(self, number: int) -> None:
        """Every rank can."""
        with self._changed:
            if number == self._number:
                self._agreed = True
                self._changed.notify_all()

    def withdraw(self, number: int | None = None) -> None:
        """Nobody needs to stop. None: whatever was asked, because the generation is over."""
        with self._changed:
            if number is None or number == self._number:
                self._over |= number is None
                self._stop, self._agreed = None, False
                self._changed.notify_all()

    # --- from the main thread ---------------------------------------------------------------------

    def enter(self) -> None:
        """A generation begins."""
        with self._changed:
            self._making, self._stop, self._agreed, self._over = -1, None, False, False

    def begin(self, step: int, total: int) -> None:
        """The loop begins with `step`, and ends with `total`."""
        with self._changed:
            self._making, self._total = step, total

    def stops_after(self, step: int, *, consistent: bool) -> bool:
        """Whether this rank stops, now that `step` has been made; otherwise the next one begins.

        `consistent`: whether the state is that of this step, and not in the middle of an accumulation.
        """
        with self._changed:
            if consistent and self._is_due(step):
                self._changed.wait_for(lambda: self._agreed or not self._is_due(step))
                if self._is_due(step):
                    return True
            self._making = step + 1
            return False

    def _is_due(self, step: int) -> bool:
        return self._stop is not None and self._stop <= step

    def stop(self, step: int) -> None:
        """Say that this rank stands, and wait until the generation is over, or all go on after all."""
        with self._changed:
            number = self._number
            self._tell(RankStopped(number=number, step=step))
            self._changed.wait_for(lambda: self._stop is None or self._number != number)
            self._making = step + 1
