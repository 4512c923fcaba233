"""Chooses the steps to copy to durable tiers whose interval is a time, in jobs without a coordinator.

Rank 0 chooses a step at least two steps ahead and writes it to the store. The first rank of each node reads the store
after each step. Because all ranks make each step together, every node reads rank 0's choice before any rank saves the
chosen step.
"""

from __future__ import annotations

import json
import math
from typing import Protocol

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.checkpoint.by_time import DueByTime


class Keys(Protocol):
    """The methods of a store that this module uses."""

    def set(self, key: str, value: bytes | str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


_NAMED = "hpx-upload-at/0"


class TimedTiers:
    """The chosen steps, as known to one rank.

    Args:
        now: present time, in seconds of a monotonic clock. The first checkpoint is due one interval after `now`.
    """

    def __init__(self, policy: CheckpointPolicy, now: float) -> None:
        self._policy, self._every, self._timer = policy, policy.seconds(), DueByTime(now)
        self._named: dict[str, int] = {}
        self._seen_at = dict.fromkeys(self._every, -math.inf)
        self._seen: dict[str, int] = {}

    def enter(self) -> None:
        """Begin a generation, in which the store is empty and rank 0 may be another process."""
        self._named, self._seen = {}, {}
        self._seen_at = dict.fromkeys(self._every, -math.inf)  # a new rank 0 may choose at other times

    def made(self, step: int, now: float, keys: Keys, *, names: bool, hears: bool) -> dict[str, int]:
        """Record a step of this rank. Returns the newly chosen steps that this node must upload, by kind of tier.

        Args:
            names: whether this rank is rank 0, which chooses steps.
            hears: whether this rank is the first rank of its node, which reads the choices.

        Raises:
            ConnectionError: the generation has ended, or rank 0 has died.
        """
        if names:
            self._name(step, now, keys)
        if not hears or not self._may_be_named(now) or not keys.check([_NAMED]):
            return {}
        named = json.loads(keys.get(_NAMED))
        fresh = {str(kind): int(due) for kind, due in named.items() if self._seen.get(kind) != due}
        self._seen |= fresh
        self._seen_at |= dict.fromkeys(fresh, now)
        self._timer.name(fresh, now)
        return fresh

    def _may_be_named(self, now: float) -> bool:
        """Return whether rank 0 may have chosen a new step; if not, the store need not be read.

        Two choices for the same tier are one interval apart. This rank may read a choice up to one step late, so it
        starts to look for the next choice after half an interval.
        """
        return any(now - self._seen_at[kind] >= every / 2 for kind, every in self._every.items())

    def _name(self, step: int, now: float, keys: Keys) -> None:
        if due := [kind for kind, every in self._every.items() if self._timer.due(kind, every, now)]:
            self._timer.name(due, now)
            self._named |= dict.fromkeys(due, self._policy.next_due(step + 2))
            keys.set(_NAMED, json.dumps(self._named))
