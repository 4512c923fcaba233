"""Questions to agents: the activity of all ranks, when some rank makes no progress; whether all live, when a collective
broke; the checkpoints in durable tiers.

The kernel marks a process as ending before it closes its sockets. So when all agents have looked after a rank saw its
connection end, and none has found such a process, nobody died: the connection itself broke.
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
"""Agents tell of a stall again and again; they are not asked more often than this."""
_ENDING = 0x4
"""PF_EXITING, of a process's flags."""
_ASK_AGAIN_S = 1.0
"""How soon a durable tier that cannot be reached is asked again; twice as long after each time."""
_UNREACHABLE_S = 60.0
"""How long it is asked again; the job fails then, as it must not go on from an older step."""

Excluded = tuple[tuple[str, str], ...]
"""URL and save id of checkpoints that are known already."""


class HangQuery:
    """Gathers the heartbeats of all ranks, and judges once they are together."""

    def __init__(self) -> None:
        self._heartbeats: dict[int, Heartbeat] = {}
        self._limit_s, self._asked_at = 0.0, 0.0

    def stalled(self, limit_s: float) -> bool:
        """An agent sees no progress. Returns whether all are to be asked now."""
        now = time.monotonic()
        if now - self._asked_at < _AGAIN_S:
            return False
        self._asked_at, self._limit_s, self._heartbeats = now, limit_s, {}
        return True

    def answered(self, heartbeats: Collection[Heartbeat], world_size: int) -> Hang | None:
        """One agent's answer. Returns who hangs, once the last one has come."""
        self._heartbeats |= {heartbeat.rank: heartbeat for heartbeat in heartbeats}
        if len(self._heartbeats) < world_size:
            return None
        complete, self._heartbeats = self._heartbeats, {}
        return find_hung(complete, world_size, self._limit_s)


@dataclass(slots=True)
class LivenessQuery:
    """Nodes that have answered. One query a generation is enough: the first rank that complains speaks for all."""

    generation: int
    fault: Fault
    """What has happened if all ranks live."""
    missing: set[int] = field(default_factory=set)
    """Nodes that have yet to answer; one that cannot is found when its lease is over."""

    def alive(self, node: int, generation: int) -> Fault | None:
        """All ranks of `node` live; the fault, once that is said of all nodes."""
        if generation != self.generation or node not in self.missing:
            return None
        self.missing.discard(node)
        return None if self.missing else self.fault


class DurableQuery:
    """One question at a time, to the agent of one node.

    `send` asks the durable tiers what they hold besides those; returns which node was asked, None: nobody is there.
    """

    def __init__(self, send: Callable[[Excluded], int | None]) -> None:
        self._send = send
        self._excluded: Excluded = ()
        self._asked_at, self._wait_s = 0.0, _ASK_AGAIN_S
        self._node: int | None = None

    def ask(self, excluded: Excluded) -> None:
        """What is there, besides those?"""
        self._excluded, self._asked_at, self._wait_s = excluded, time.monotonic(), _ASK_AGAIN_S
        self._repeat()

    def _repeat(self) -> None:
        self._node = self._send(self._excluded)

    def node_lost(self, node: int) -> None:
        """Ask another one, if this one was asked."""
        if node == self._node:
            self._repeat()

    def answered(self, *, reached: bool) -> bool:
        """The answer is there; whether it is to be used: else it is asked again in a while, as a tier could not be
        reached and has not had its time."""
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
    """Whether none of these processes of this machine ends, or has ended."""
    return not any(_is_ending(pid) for pid in pids)


def _is_ending(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _ENDING)
