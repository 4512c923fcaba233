"""How long the memory of nodes without ranks is kept: until what it holds has been saved anew. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Retention:
    """Until which step the memory of nodes that gave up their ranks may be needed."""

    next_due: Callable[[int], int] = lambda step: step
    """The first step from one on that is saved to memory."""
    until: int | None = None
    """None: not known before all ranks have restored."""

    def begin(self) -> None:
        """Nodes give up their ranks."""
        self.until = None

    def went_on(self, step: int, *, sharded: bool) -> None:
        """All ranks go on after `step`. `sharded`: each rank holds a part of the state that no other has."""
        if self.until is None:
            # shards that were cut anew are safe once they have been saved once; the step after that shows it
            self.until = self.next_due(step + 1) + 1 if sharded else step

    def is_over(self, step: int) -> bool:
        """Whether it is not needed any more, now that every rank has committed `step`."""
        return self.until is not None and step >= self.until
