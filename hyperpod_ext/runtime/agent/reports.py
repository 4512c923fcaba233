"""Sends the reports of a node to the coordinator."""

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
"""Seconds for which a rank's `Join` or `Restored` report waits for those of the node's other ranks."""
_LAST_WORD_S = 5.0
"""Number of seconds for which a node that cannot continue waits for the coordinator's order to stop."""
_FAILED = JobFailedError.__name__


class NodeReports:
    """Sends the reports of a node, and runs the node's background tasks. If a background task fails, reports that the
    node has failed.

    Args:
        generation: function that returns the current generation of the node's workers.
    """

    def __init__(self, node: int, client: CoordinatorClient, generation: Callable[[], int]) -> None:
        self._node, self._client, self._generation = node, client, generation
        self.listeners: list[Callable[[c.ToAgent | c.FromAgent], None]] = []
        """Functions that are called with each report of this node and each order of the coordinator."""
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Future with the reason why this node stops without an order of the coordinator; pending while the node
        runs."""
        self.over = False
        """Whether the job has ended for this node, or continues without this node."""
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, report: c.FromAgent) -> None:
        """Send `report` to the coordinator. A worker's report from before its first join has no generation, and gets
        the generation of the node."""
        if not report.generation:
            report = report.model_copy(update={"generation": self._generation()})
        self.pass_on(report)
        self._client.send(report)

    def event(self, event: str, **fields: Any) -> None:
        """Send an event to the job's event log."""
        t = fields.pop("t", None) or time.monotonic()
        self.tell(c.Event(event=event, t=t, fields={**fields, "node": self._node}))

    def pass_on(self, message: c.ToAgent | c.FromAgent) -> None:
        """Call all `listeners` with `message`."""
        for listener in self.listeners:
            listener(message)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a background task. If the task fails, report that the node has failed."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            # `ForkSupervisor` handles the end of the fork server
            if error is not None and not isinstance(error, ForkServerEndedError):
                self.fail(str(error), code=type(error).__name__ if isinstance(error, HyperpodExtError) else _FAILED)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)

    def fail(self, why: str, *, code: str = _FAILED, lost: bool = False) -> None:
        """Report that this node cannot continue. `lost`: whether the job may recover by replacing this node with a
        spare."""
        self.report_last(c.NodeBroken(cause=why, code=code, lost=lost), why)

    def report_last(self, report: c.NodeBroken | c.CancelJob, why: str) -> None:
        """Send `report`. If the coordinator does not order this node to stop within a few seconds, set `broken` to
        `why`, so that the node stops by itself."""

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
    """Combines the `Join` reports of a node's ranks into one message, and also their `Restored` reports. A message is
    sent once all ranks have reported, or shortly after the first report.

    Args:
        send: function that sends a message to the coordinator.
        ranks: function that returns the ranks of this node.
    """

    def __init__(self, send: Callable[[c.FromAgent], None], ranks: Callable[[], Collection[int]]) -> None:
        self._send, self._ranks = send, ranks
        self._joins: dict[int, c.Join] = {}
        self._held: tuple[c.HeldSnapshot, ...] = ()
        self._pieces: tuple[c.HeldPiece, ...] = ()
        self._disk = c.DiskState()
        self._restored: dict[int, c.Restored] = {}
        self._have_joined: set[int] = set()
        """Ranks whose `Join` report was sent or will be sent soon."""
        self._have_restored: set[tuple[int, int]] = set()
        """Attempt and rank of each `Restored` report that was sent or will be sent soon."""
        self._timer: asyncio.TimerHandle | None = None

    def join(
        self,
        rank: int,
        join: c.Join,
        held: tuple[c.HeldSnapshot, ...],
        pieces: tuple[c.HeldPiece, ...] = (),
        disk: c.DiskState = c.DiskState(),  # noqa: B008  (it never changes)
    ) -> None:
        """Report that `rank` waits for the begin of a generation.

        Args:
            held: snapshots in the node's memory.
            pieces: parity pieces in the node's memory.
            disk: snapshots and problems that were found on the node's disks.
        """
        self._joins[rank], self._held, self._pieces, self._disk = join, held, pieces, disk
        self._have_joined.add(rank)
        self._wait_for_others(self._have_joined)

    def restored(self, rank: int, report: c.Restored) -> None:
        """Report that `rank` has restored its state. If possible, the report is combined with reports of other
        ranks."""
        if any(other.attempt != report.attempt for other in self._restored.values()):
            self.flush()
        self._restored[rank] = report
        self._have_restored.add((report.attempt, rank))
        self._wait_for_others({rank for attempt, rank in self._have_restored if attempt == report.attempt})

    def take_back(self, rank: int) -> None:
        """Discard the unsent reports of `rank`, because a new process replaces the rank's process."""
        self._joins.pop(rank, None)
        self._restored.pop(rank, None)
        self._have_joined.discard(rank)

    def tell(self, report: c.FromAgent) -> None:
        """Send all waiting reports, and then `report`."""
        self.flush()
        self._send(report)

    def drop(self) -> None:
        """Discard all unsent reports, because the generation has ended, and all ranks will join again."""
        self._joins, self._restored = {}, {}
        self._have_joined, self._have_restored = set(), set()
        self._stop()

    def flush(self) -> None:
        """Send all reports that are waiting for reports of other ranks."""
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
