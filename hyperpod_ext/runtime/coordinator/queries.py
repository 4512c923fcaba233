"""Queries that the coordinator sends to agents.

One query collects heartbeats of all ranks when a rank makes no progress. A second checks that all ranks live when a
collective broke. A third searches the durable tiers for checkpoints.

The kernel marks a process as ending before it closes the process's sockets. So if every agent checks its processes
after a rank's connection ended, and no agent finds an ending process, then no process died and only the connection
broke.
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
"""Shortest time between two hang queries, in seconds. Agents report a stall repeatedly."""
_ENDING = 0x4
"""The flag PF_EXITING in a process's flags."""
_ASK_AGAIN_S = 1.0
"""Seconds before the first retry of an unreachable durable tier. The delay doubles with each retry."""
_UNREACHABLE_S = 60.0
"""Seconds for which an unreachable durable tier is retried. Then the job fails, because it must not continue from an
older step."""

Excluded = tuple[tuple[str, str], ...]
"""URL and save id of each checkpoint that an answer must leave out."""


class HangQuery:
    """Collects the heartbeats of all ranks, then finds the hung ranks."""

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
        """Add one agent's heartbeats. Once all ranks' heartbeats have arrived, returns the hang if there is one."""
        self._heartbeats |= {heartbeat.rank: heartbeat for heartbeat in heartbeats}
        if len(self._heartbeats) < world_size:
            return None
        complete, self._heartbeats = self._heartbeats, {}
        return find_hung(complete, world_size, self._limit_s)


@dataclass(slots=True)
class LivenessQuery:
    """A check that all ranks live. A generation needs only one, started by its first report of a broken collective."""

    generation: int
    fault: Fault
    """The fault that counts if all ranks live."""
    missing: set[int] = field(default_factory=set)
    """Nodes with ranks that have not answered. A lost node never answers; its loss is detected when its lease ends."""

    def alive(self, node: int, generation: int) -> Fault | None:
        """Record that all ranks of `node` live. Returns the fault once every node has answered, else None."""
        if generation != self.generation or node not in self.missing:
            return None
        self.missing.discard(node)
        return None if self.missing else self.fault


class DurableQuery:
    """The query for checkpoints in durable tiers. Only one query runs at a time, on the agent of one node.

    Args:
        send: sends the query to an agent and returns the agent's node; None if no agent is connected.
    """

    def __init__(self, send: Callable[[Excluded], int | None]) -> None:
        self._send = send
        self._excluded: Excluded = ()
        self._asked_at, self._wait_s = 0.0, _ASK_AGAIN_S
        self._node: int | None = None

    def ask(self, excluded: Excluded) -> None:
        """Request the checkpoints in the durable tiers, except the `excluded` ones."""
        self._excluded, self._asked_at, self._wait_s = excluded, time.monotonic(), _ASK_AGAIN_S
        self._repeat()

    def _repeat(self) -> None:
        self._node = self._send(self._excluded)

    def node_lost(self, node: int) -> None:
        """Send the query to another node if it was sent to this one."""
        if node == self._node:
            self._repeat()

    def answered(self, *, reached: bool) -> bool:
        """Return whether to use an answer. If a tier was not reached, the query is repeated until its time is over.

        Args:
            reached: whether the agent could reach all tiers.
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
