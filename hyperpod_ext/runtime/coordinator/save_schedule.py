"""Schedules copies to tiers whose interval is in seconds, and sets the interval of snapshots in memory."""

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
"""Share of a tier's interval to wait before the next attempt to schedule a copy that is overdue. Without this wait, the
attempt would be repeated after each step of each rank, thousands of times per second."""
_AHEAD = 2
"""Number of steps by which copies to durable tiers are scheduled ahead. A small number is enough: if a schedule reaches
a node too late, that checkpoint stays incomplete, and the previous checkpoint remains."""


class SaveSchedule:
    """Schedules the steps to copy to each tier, far enough ahead that every node receives the schedule before it makes
    the step.

    Args:
        log: function that writes an event to the log.
        now: start of this coordinator, on the monotonic clock.
        learned: state of the former coordinator's interval tuner; empty for the first coordinator.
    """

    def __init__(
        self, config: RuntimeConfig, log: Callable[..., None], now: float, learned: Mapping[str, Any] = _NOTHING
    ) -> None:
        self._tiers, self._log, self._timer = config.checkpoint.tiers, log, DueByTime(now)
        self.tuner = Tuner(config.checkpoint, config.nodes, now, time.time())
        self.tuner.inherit(learned)
        self.policy = config.checkpoint
        """The checkpoint policy that all ranks use in this generation."""
        self.peer_step: int | None = None
        """The step that was last scheduled for copies to peers; None if no step was scheduled yet. Nodes that join
        later must also receive this scheduled step."""
        self.replicated = False
        """Whether every rank holds the same state, so that copies to peers are not needed."""
        self._look_at: dict[str, float] = {}
        """Maps the kind of each overdue tier to the time of the next attempt to schedule a copy."""
        if learned:
            self._take_memory_every()

    def begins(self, now: float) -> int | None:
        """Tune the interval of snapshots in memory at the start of a generation. Returns the number of steps between
        two snapshots; None if the interval in the spec applies."""
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
        """Record that a generation starts to train, after all its ranks have restored their state."""
        self.tuner.went_on(membership)

    def heard(self, event: Mapping[str, Any], now: float) -> bool:
        """Pass an event to the interval tuner. Returns whether the interval of some tier has changed."""
        changed = self.tuner.heard(event, now)
        for kind, seconds in changed.items():
            self._log("tuned", tier=kind, every_seconds=round(seconds, 3))
        return bool(changed)

    def due(self, ranks: Ranks, membership: Membership, now: float) -> list[tuple[str, int]]:
        """Schedule a step for each tier whose next copy is due. Returns the kinds of these tiers with their steps."""
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
        """Return the number of steps by which the next copy to peers is scheduled ahead. Returns None if no copies to
        peers are needed, if no step was measured yet, or if the last scheduled copy comes within this number of
        steps."""
        ahead = self.tuner.steps_ahead()
        if ahead is None or self.replicated or nodes == 1:
            return None
        return None if newest < (self.peer_step or 0) <= newest + ahead else ahead
