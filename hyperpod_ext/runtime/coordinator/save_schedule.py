"""Which step goes next to tiers that go by time, and how often snapshots are taken, in the job that runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hyperpod_ext.config.checkpoint.by_time import DueByTime
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.coordinator.interval_tuner import Tuner
from hyperpod_ext.runtime.coordinator.job_run import Ranks
from hyperpod_ext.runtime.membership.membership import Membership

_NOTHING: Mapping[str, Any] = MappingProxyType({})
LOOK_AGAIN = 1 / 16
"""Share of a tier's interval after which it is looked again whether a step of it can be named. Each step of each rank
asks, which may be thousands a second."""
_AHEAD = 2  # steps, of durable tiers: a checkpoint that a node hears of too late leaves the one before as it is


class SaveSchedule:
    """Names steps ahead of time, so that every node hears of them before it makes them.

    Args:
        log: takes what is worth an event.
        now: when this coordinator began.
        learned: what the one before it had learned of the job; empty: there was none.
    """

    def __init__(
        self, config: RuntimeConfig, log: Callable[..., None], now: float, learned: Mapping[str, Any] = _NOTHING
    ) -> None:
        self._tiers, self._log, self._timer = config.checkpoint.tiers, log, DueByTime(now)
        self.tuner = Tuner(config.checkpoint, config.nodes, now, time.time())
        self.tuner.inherit(learned)
        self.policy = config.checkpoint
        """As all ranks have it in this generation."""
        self.peer_step: int | None = None
        """The last step that was named for copies on peers. Nodes that come later must go by it, too."""
        self.replicated = False
        """Every rank holds the same state: none is copied to peers."""
        self._look_at: dict[str, float] = {}
        """Of tiers that are due: when it is looked again whether a step can be named."""
        if learned:
            self._take_memory_every()

    def begins(self, now: float) -> int | None:
        """A generation begins: steps between two snapshots in memory from now on. None: as the spec says."""
        self._look_at.clear()
        every, before = self.tuner.begins(now), self.policy.memory()
        if every is not None and before is not None:
            if every != before.every_steps:
                self._log("tuned", tier="memory", every_steps=every)
            self._take_memory_every()
        return every

    def _take_memory_every(self) -> None:
        if self.tuner.memory_every is not None:
            self.policy = self.policy.with_memory_every(self.tuner.memory_every)

    def went_on(self, membership: Membership) -> None:
        """All ranks of a generation go on."""
        self.tuner.went_on(membership)

    def heard(self, event: Mapping[str, Any], now: float) -> bool:
        """Learn from an event of an agent or a worker; whether an interval has changed with it."""
        changed = self.tuner.heard(event, now)
        for kind, seconds in changed.items():
            self._log("tuned", tier=kind, every_seconds=round(seconds, 3))
        return bool(changed)

    def due(self, ranks: Ranks, membership: Membership, now: float) -> list[tuple[str, int]]:
        """Tiers that are due, each with the step that it gets."""
        named: list[tuple[str, int]] = []
        for tier in self._tiers:
            every = self.tuner.seconds(tier)
            if tier.kind == "memory" or every is None or not self._timer.due(tier.kind, every, now):
                continue
            if now < self._look_at.get(tier.kind, now):
                continue
            newest = ranks.newest(membership.committed)
            ahead = self._ahead_for_peers(newest, membership.size) if tier.kind == "peer" else _AHEAD
            if ahead is None:
                self._look_at[tier.kind] = now + every * LOOK_AGAIN
            else:
                self._timer.name([tier.kind], now)
                named.append((tier.kind, self._name(tier.kind, newest + ahead)))
        return named

    def _name(self, kind: str, earliest: int) -> int:
        step = self.policy.next_due(earliest)
        if kind == "peer":
            self.peer_step = step
        self.tuner.named(kind, step)
        return step

    def _ahead_for_peers(self, newest: int, nodes: int) -> int | None:
        """How many steps ahead to schedule the next peer copy. None if there is no peer tier, or if the scheduled step
        has not been reached yet."""
        ahead = self.tuner.steps_ahead()
        if ahead is None or self.replicated or nodes == 1:
            return None
        return None if newest < (self.peer_step or 0) <= newest + ahead else ahead
