"""Queries to agents: heartbeats of all ranks when one makes no progress, liveness of all ranks when a collective broke,
and checkpoints in the durable tiers.

The kernel marks a process as ending before it closes its sockets. If every agent checks its processes after a rank's
connection ended, and none finds an ending one, then no process died: the connection itself broke.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ext.runtime.detection.hangs import Hang, Heartbeat, find_hung
from hyperpod_ext.runtime.membership.actions import Fault

_AGAIN_S = 0.5
"""Shortest time between two hang queries: agents report a stall repeatedly."""
_ENDING = 0x4
"""PF_EXITING, of a process's flags."""
_ASK_AGAIN_S = 1.0
"""Delay before the first retry of an unreachable durable tier. It doubles with each retry."""
_UNREACHABLE_S = 60.0
"""Time during which an unreachable durable tier is retried. Then the job fails, because it must not continue from an
older step."""

Excluded = tuple[tuple[str, str], ...]
"""URL and save id of each checkpoint that the answer must leave out."""


class HangQuery:
    """Collects the heartbeats of all ranks, then finds the hung ones."""

    def __init__(self) -> None:
        self._heartbeats: dict[int, Heartbeat] = {}
        self._limit_s, self._asked_at = 0.0, 0.0

    def stalled(self, limit_s: float) -> bool:
        """Record that an agent reports a stall. Returns whether to request heartbeats from all agents now."""
        now = time.monotonic()
        if now - self._asked_at < _AGAIN_S:
            return False
        self._asked_at, self._limit_s, self._heartbeats = now, limit_s, {}
        return True

    def answered(self, heartbeats: Collection[Heartbeat], world_size: int) -> Hang | None:
        """Add the heartbeats of one agent. Returns the hang, if one is found once all ranks' heartbeats are here."""
        self._heartbeats |= {heartbeat.rank: heartbeat for heartbeat in heartbeats}
        if len(self._heartbeats) < world_size:
            return None
        complete, self._heartbeats = self._heartbeats, {}
        return find_hung(complete, world_size, self._limit_s)


@dataclass(slots=True)
class LivenessQuery:
    """A check that all ranks live. One per generation is enough: the first report of a broken collective starts it."""

    generation: int
    fault: Fault
    """The fault to count if all ranks live."""
    missing: set[int] = field(default_factory=set)
    """Nodes that have not answered. A lost node never answers; its loss is detected when its lease ends."""

    def alive(self, node: int, generation: int) -> Fault | None:
        """Record that all ranks of `node` live. Returns the fault once all nodes have answered, else None."""
        if generation != self.generation or node not in self.missing:
            return None
        self.missing.discard(node)
        return None if self.missing else self.fault


class DurableQuery:
    """The query for checkpoints in durable tiers, one at a time, to the agent of one node.

    Args:
        send: sends the query to an agent and returns its node; None if no agent is connected.
    """

    def __init__(self, send: Callable[[Excluded], int | None]) -> None:
        self._send = send
        self._excluded: Excluded = ()
        self._asked_at, self._wait_s = 0.0, _ASK_AGAIN_S
        self._node: int | None = None

    def ask(self, excluded: Excluded) -> None:
        """Request the checkpoints in the durable tiers, without `excluded` ones."""
        self._excluded, self._asked_at, self._wait_s = excluded, time.monotonic(), _ASK_AGAIN_S
        self._repeat()

    def _repeat(self) -> None:
        self._node = self._send(self._excluded)

    def node_lost(self, node: int) -> None:
        """Send the query to another node, if it went to this one."""
        if node == self._node:
            self._repeat()

    def answered(self, *, reached: bool) -> bool:
        """Return whether to use an answer. If a tier was not reached, the query is sent again until its time is over.

        Args:
            reached: whether the agent reached all tiers.
        """
        if not reached and self._again():
            return False
        self._node = None
        return True

    def _again(self) -> bool:
        if time.monotonic() + self._wait_s > self._asked_at + _UNREACHABLE_S:
            return False
        asyncio.get_running_loop().call_later(self._wait_s, self._repeat)
        self._wait_s *= 2
        return True


def all_live(pids: Collection[int]) -> bool:
    """Return whether none of these processes on this machine is ending or has ended."""
    return not any(_is_ending(pid) for pid in pids)


def _is_ending(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _ENDING)
