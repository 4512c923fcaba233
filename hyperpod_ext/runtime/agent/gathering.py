"""Reports that several workers of a node make at about the same time, sent as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.gathered import node_join

_WAIT_S = 0.01
"""How long the first of them waits for the others."""


class Gathering:
    """Joins and restores of one node's ranks. They are sent once all ranks have said the like, or a moment later.

    Args:
        tell: sends to the coordinator.
        ranks: ranks of this node that there are.
    """

    def __init__(self, tell: Callable[[c.FromAgent], None], ranks: Callable[[], Collection[int]]) -> None:
        self._send, self._ranks = tell, ranks
        self._joins: dict[int, c.Join] = {}
        self._held: tuple[c.HeldSnapshot, ...] = ()
        self._pieces: tuple[c.HeldPiece, ...] = ()
        self._disk = c.DiskState()
        self._restored: dict[int, c.Restored] = {}
        self._have_joined: set[int] = set()
        """Ranks whose join was sent, or waits here."""
        self._have_restored: set[tuple[int, int]] = set()
        """The like of an attempt to restore, and rank."""
        self._timer: asyncio.TimerHandle | None = None

    def join(
        self,
        rank: int,
        join: c.Join,
        held: tuple[c.HeldSnapshot, ...],
        pieces: tuple[c.HeldPiece, ...] = (),
        disk: c.DiskState = c.DiskState(),  # noqa: B008  (it never changes)
    ) -> None:
        """`rank` waits for a generation. `held`, `pieces`, `disk`: what the node's memory and disks have now."""
        self._joins[rank], self._held, self._pieces, self._disk = join, held, pieces, disk
        self._have_joined.add(rank)
        self._wait_for_others(self._have_joined)

    def restored(self, rank: int, report: c.Restored) -> None:
        """`rank` has restored what was decided."""
        if any(other.attempt != report.attempt for other in self._restored.values()):
            self.flush()
        self._restored[rank] = report
        self._have_restored.add((report.attempt, rank))
        self._wait_for_others({rank for attempt, rank in self._have_restored if attempt == report.attempt})

    def take_back(self, rank: int) -> None:
        """Another process takes the place of `rank`: what it said and was not sent is no news."""
        self._joins.pop(rank, None)
        self._restored.pop(rank, None)
        self._have_joined.discard(rank)

    def tell(self, report: c.FromAgent) -> None:
        """Send what comes after all that was said so far."""
        self.flush()
        self._send(report)

    def drop(self) -> None:
        """A generation is over: what was said of it is no news, and who waits says so again."""
        self._joins, self._restored = {}, {}
        self._have_joined, self._have_restored = set(), set()
        self._stop()

    def flush(self) -> None:
        """Send what there is."""
        self._stop()
        joins, self._joins = self._joins, {}
        restored, self._restored = self._restored, {}
        if joins:
            self._send(node_join(joins, self._held, 0, self._pieces, self._disk))
        if restored:
            rank, first = min(restored.items())
            self._send(first.model_copy(update={"rank": rank, "ranks": tuple(sorted(restored))}))

    def _wait_for_others(self, reported: Collection[int]) -> None:
        if set(self._ranks()) <= set(reported):
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WAIT_S, self.flush)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
