"""Tracks the queries that the coordinator sends to agents, and combines the answers.

The hang query collects the heartbeats of all ranks when a rank makes no progress. The liveness query checks whether all
ranks are alive when a collective failed. The durable query lists the checkpoints in durable tiers.

The kernel marks a process as ending before it closes the process's sockets. So if agents find no ending process after a
failed collective, no process has died, and only a connection broke.
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
"""Minimum number of seconds between two hang queries, because agents report the same stall repeatedly."""
_ENDING = 0x4
"""The bit PF_EXITING in the flags of a process in `/proc/PID/stat`."""
_ASK_AGAIN_S = 1.0
"""Number of seconds before the durable query is first repeated because a tier could not be reached. The delay doubles
with each retry."""
_UNREACHABLE_S = 60.0
"""Number of seconds for which the durable query is repeated while a tier cannot be reached. After this time, the job
fails if the unreachable tier may have the newest step, because a job must not continue from an older step."""

Excluded = tuple[tuple[str, str], ...]
"""URL and save id of each checkpoint that must be left out of the answer to the durable query."""


class HangQuery:
    """The hang query: collects the heartbeats of all ranks, then finds the hung ranks."""

    def __init__(self) -> None:
        self._heartbeats: dict[int, Heartbeat] = {}
        self._limit_s, self._asked_at = 0.0, 0.0

    def stalled(self, limit_s: float) -> bool:
        """Record that an agent reports a rank without progress for `limit_s` seconds. Returns whether to request
        heartbeats from all agents now."""
        now = time.monotonic()
        if now - self._asked_at < _AGAIN_S:
            return False
        self._asked_at, self._limit_s, self._heartbeats = now, limit_s, {}
        return True

    def answered(self, heartbeats: Collection[Heartbeat], world_size: int) -> Hang | None:
        """Add the heartbeats of one agent's ranks. Once the heartbeats of all ranks have arrived, returns the hang that
        they show, or None if they show no hang."""
        self._heartbeats |= {heartbeat.rank: heartbeat for heartbeat in heartbeats}
        if len(self._heartbeats) < world_size:
            return None
        complete, self._heartbeats = self._heartbeats, {}
        return find_hung(complete, world_size, self._limit_s)


@dataclass(slots=True)
class LivenessQuery:
    """The liveness query: checks whether all ranks are alive. The liveness query is sent at most once in a generation,
    after the first report of a failed collective."""

    generation: int
    fault: Fault
    """The fault to record if all ranks turn out to be alive."""
    missing: set[int] = field(default_factory=set)
    """Nodes with ranks that have not answered yet. The loss of a node is detected without the liveness query."""

    def alive(self, node: int, generation: int) -> Fault | None:
        """Record the answer of `node` that all its ranks are alive. Returns the fault to record once every node has
        answered; None before that."""
        if generation != self.generation or node not in self.missing:
            return None
        self.missing.discard(node)
        return None if self.missing else self.fault


class DurableQuery:
    """The durable query: requests a list of the checkpoints in durable tiers from one agent at a time.

    Args:
        send: function that sends the query to an agent and returns the agent's node, or None if no agent is connected.
    """

    def __init__(self, send: Callable[[Excluded], int | None]) -> None:
        self._send = send
        self._excluded: Excluded = ()
        self._asked_at, self._wait_s = 0.0, _ASK_AGAIN_S
        self._node: int | None = None

    def ask(self, excluded: Excluded) -> None:
        """Request the list of checkpoints in the durable tiers, without the checkpoints in `excluded`."""
        self._excluded, self._asked_at, self._wait_s = excluded, time.monotonic(), _ASK_AGAIN_S
        self._repeat()

    def _repeat(self) -> None:
        self._node = self._send(self._excluded)

    def node_lost(self, node: int) -> None:
        """Send the query to another node if it had been sent to the lost node `node`."""
        if node == self._node:
            self._repeat()

    def answered(self, *, reached: bool) -> bool:
        """Return whether the received answer can be used. If a tier could not be reached, the query is repeated until
        its time limit has passed.

        Args:
            reached: whether the answering agent could reach all tiers.
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
    """Return whether all processes with these ids are alive on this machine, that is, not ending and not ended."""
    return not any(_is_ending(pid) for pid in pids)


def _is_ending(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _ENDING)
