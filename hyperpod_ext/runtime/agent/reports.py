"""Reports of a node to the coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.runtime.agent.children import ForkServerEndedError
from hyperpod_ext.runtime.agent.coordinator_client import CoordinatorClient
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.gathered import node_join

_WAIT_S = 0.01
"""How long the first of several reports waits for the others."""
_LAST_WORD_S = 5.0
"""How long a node that cannot continue waits for the coordinator to end the job."""
_FAILED = JobFailedError.__name__


class NodeReports:
    """Sends reports of a node, and runs background tasks: if one fails, it reports that the node has failed.

    Args:
        generation: returns the generation of the node's workers.
    """

    def __init__(self, node: int, client: CoordinatorClient, generation: Callable[[], int]) -> None:
        self._node, self._client, self._generation = node, client, generation
        self.listeners: list[Callable[[c.ToAgent | c.FromAgent], None]] = []
        """Called with each report, and with each order of the coordinator."""
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why this node ends without an order; pending if it does not."""
        self.over = False
        """Whether the job has ended, or continues without this node."""
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, report: c.FromAgent) -> None:
        """Send `report`. If it has no generation, as before its worker's first join, it gets the node's."""
        if not report.generation:
            report = report.model_copy(update={"generation": self._generation()})
        self.pass_on(report)
        self._client.send(report)

    def event(self, event: str, **fields: Any) -> None:
        """Send an event for the job's event log."""
        t = fields.pop("t", None) or time.monotonic()
        self.tell(c.Event(event=event, t=t, fields={**fields, "node": self._node}))

    def pass_on(self, message: c.ToAgent | c.FromAgent) -> None:
        """Call all listeners."""
        for listener in self.listeners:
            listener(message)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a background task."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, ForkServerEndedError):  # its exit status is reported
                self.fail(str(error), code=type(error).__name__ if isinstance(error, HyperpodExtError) else _FAILED)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)

    def fail(self, why: str, *, code: str = _FAILED, lost: bool = False) -> None:
        """Report that this node cannot continue. `lost`: a spare node can take its place."""
        self.report_last(c.NodeBroken(cause=why, code=code, lost=lost), why)

    def report_last(self, report: c.NodeBroken | c.CancelJob, why: str) -> None:
        """Send `report`, and end this node if the coordinator does not end the job within a few seconds."""

        def give_up() -> None:
            if not self.broken.done():
                self.broken.set_result(why)

        if not self._client.connected:
            give_up()
        else:
            self.tell(report)
            asyncio.get_running_loop().call_later(_LAST_WORD_S, give_up)

    def why_broken(self) -> str:
        return self.broken.result() if self.broken.done() else ""


class Gathering:
    """Combines the joins of a node's ranks, and their restores, in one message: sent once all ranks have reported, or
    shortly after the first one.

    Args:
        send: sends to the coordinator.
        ranks: returns the ranks of this node.
    """

    def __init__(self, send: Callable[[c.FromAgent], None], ranks: Callable[[], Collection[int]]) -> None:
        self._send, self._ranks = send, ranks
        self._joins: dict[int, c.Join] = {}
        self._held: tuple[c.HeldSnapshot, ...] = ()
        self._pieces: tuple[c.HeldPiece, ...] = ()
        self._disk = c.DiskState()
        self._restored: dict[int, c.Restored] = {}
        self._have_joined: set[int] = set()
        """Ranks whose join was sent or is about to be."""
        self._have_restored: set[tuple[int, int]] = set()
        """Attempt and rank of each restore."""
        self._timer: asyncio.TimerHandle | None = None

    def join(
        self,
        rank: int,
        join: c.Join,
        held: tuple[c.HeldSnapshot, ...],
        pieces: tuple[c.HeldPiece, ...] = (),
        disk: c.DiskState = c.DiskState(),  # noqa: B008  (it never changes)
    ) -> None:
        """Send that `rank` waits for a generation.

        Args:
            held, pieces, disk: snapshots and parity in the node's memory, and the state of its disks.
        """
        self._joins[rank], self._held, self._pieces, self._disk = join, held, pieces, disk
        self._have_joined.add(rank)
        self._wait_for_others(self._have_joined)

    def restored(self, rank: int, report: c.Restored) -> None:
        """Send that `rank` has restored."""
        if any(other.attempt != report.attempt for other in self._restored.values()):
            self.flush()
        self._restored[rank] = report
        self._have_restored.add((report.attempt, rank))
        self._wait_for_others({rank for attempt, rank in self._have_restored if attempt == report.attempt})

    def take_back(self, rank: int) -> None:
        """Drop unsent reports of `rank`, because another process replaces it."""
        self._joins.pop(rank, None)
        self._restored.pop(rank, None)
        self._have_joined.discard(rank)

    def tell(self, report: c.FromAgent) -> None:
        """Send `report` after all earlier ones."""
        self.flush()
        self._send(report)

    def drop(self) -> None:
        """Drop all unsent reports: the generation has ended, and waiting ranks join again."""
        self._joins, self._restored = {}, {}
        self._have_joined, self._have_restored = set(), set()
        self._stop()

    def flush(self) -> None:
        """Send all waiting reports now."""
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
