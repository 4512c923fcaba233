"""Stops this rank after a given step, so that all ranks stop after the same step before a resize.

The coordinator asks every rank in advance whether it can still stop after a step. A rank that can stop waits after the
requested step until the coordinator has received the answers of all ranks. So no rank is ever in a collective that
another rank has already left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hyperpod_ext.runtime.ipc.control_messages import RankStopped, StopAnswer

Send = Callable[[StopAnswer | RankStopped], None]


class StopAtStep:
    """A requested stop of this rank. The receiving thread gets the requests; the main thread waits at the stop.

    Args:
        send: function that sends this rank's answers to the coordinator.
    """

    ends = False
    """Whether the process ends at the stop, so that only its saved state remains."""

    def __init__(self, send: Send = lambda report: None) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._making = -1
        """Step that this rank is making, or will make next. -1 before its training loop has begun."""
        self._total = 0
        self._number = 0
        self._stop: int | None = None
        self._agreed = False
        self._over = False

    # --- called by the receiving thread -----------------------------------------------------------

    def ask(self, number: int, step: int, *, ends: bool = False) -> None:
        """Answer whether this rank can stop after `step`, and stop there if it can.

        Args:
            number: number of the stop request.
            ends: whether the process ends at the stop.
        """
        with self._changed:
            over = self._making >= 0 and step >= self._total
            can = not over and not self._over and 0 <= self._making <= step
            self._number, self._agreed, self.ends = number, False, ends
            self._stop = step if can else None
            self._changed.notify_all()
            self._send(StopAnswer(number=number, can=can, at=self._making, over=over))

    def agree(self, number: int) -> None:
        """Confirm the stop with this request number, because every rank can stop."""
        with self._changed:
            if number == self._number:
                self._agreed = True
                self._changed.notify_all()

    def withdraw(self, number: int | None = None) -> None:
        """Withdraw a requested stop of this rank. `number`: number of the stop request to withdraw; None withdraws any
        request, at the end of a generation."""
        with self._changed:
            if number is None or number == self._number:
                self._over |= number is None
                self._stop, self._agreed = None, False
                self._changed.notify_all()

    # --- called by the main thread ----------------------------------------------------------------

    def enter(self) -> None:
        """Begin a generation, in which no stop is requested yet."""
        with self._changed:
            self._making, self._stop, self._agreed, self._over = -1, None, False, False

    def begin(self, step: int, total: int) -> None:
        """Begin the training loop at `step`. The last step of the loop is `total`."""
        with self._changed:
            self._making, self._total = step, total

    def stops_after(self, step: int, *, consistent: bool) -> bool:
        """Return whether this rank stops after `step`. If a stop after `step` is requested, first wait for the answers
        of all ranks.

        `consistent`: whether the state is that of a complete step, and not within an accumulation of gradients.
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
        """Report that this rank has stopped, and wait until the generation ends or the stop is withdrawn."""
        with self._changed:
            number = self._number
            self._send(RankStopped(number=number, step=step))
            self._changed.wait_for(lambda: self._stop is None or self._number != number)
            self._making = step + 1
