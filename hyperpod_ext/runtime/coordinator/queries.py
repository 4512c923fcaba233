"""Questions to all agents: what ranks do, when some rank makes no progress; whether they live, when a collective broke.

The kernel marks a process as ending before it closes its sockets. So when all agents have looked after a rank saw its
connection end, and none has found such a process, nobody died: the connection itself broke.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ext.runtime.detection.hangs import Hang, Heartbeat, find_hung
from hyperpod_ext.runtime.membership.actions import Fault

_AGAIN_S = 0.5
"""Agents tell of a stall again and again; they are not asked more often than this."""
_ENDING = 0x4
"""PF_EXITING, of a process's flags."""


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


def all_live(pids: Collection[int]) -> bool:
    """Whether none of these processes of this machine ends, or has ended."""
    return not any(_is_ending(pid) for pid in pids)


def _is_ending(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _ENDING)
