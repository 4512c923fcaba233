"""Durable tiers that go by time, where no coordinator keeps it: rank 0 names the step, ahead of it.

The first rank of each node looks for it once it has made a step. Rank 0 has named the step by then, for all made that
step together; and the step it has named is none of those that anybody has saved yet. So every node hears in time.
"""

from __future__ import annotations

import json
import math
from typing import Protocol

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.checkpoint.by_time import DueByTime


class Keys(Protocol):
    """What of a store is needed here."""

    def set(self, key: str, value: bytes | str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


_NAMED = "hpx-upload-at/0"


class TimedTiers:
    """One rank's part in it.

    Args:
        now: seconds, of a clock that only runs forward; the first checkpoint is due one interval later.
    """

    def __init__(self, policy: CheckpointPolicy, now: float) -> None:
        self._policy, self._every, self._timer = policy, policy.seconds(), DueByTime(now)
        self._named: dict[str, int] = {}
        self._heard_at = dict.fromkeys(self._every, -math.inf)
        self._heard: dict[str, int] = {}

    def enter(self) -> None:
        """A generation begins, with a store where nothing is named yet, and perhaps with another rank 0."""
        self._named, self._heard = {}, {}
        self._heard_at = dict.fromkeys(self._every, -math.inf)  # that one's clock may stand elsewhere

    def made(self, step: int, now: float, keys: Keys, *, names: bool, hears: bool) -> dict[str, int]:
        """This rank has made `step`. Returns the steps that its node is to bring to tiers, by their kinds.

        Args:
            names: whether it is rank 0.
            hears: whether it is the first rank of its node.

        Raises:
            ConnectionError: the generation is over, or rank 0 is.
        """
        if names:
            self._name(step, now, keys)
        if not hears or not self._may_be_named(now) or not keys.check([_NAMED]):
            return {}
        named = json.loads(keys.get(_NAMED))
        fresh = {str(kind): int(due) for kind, due in named.items() if self._heard.get(kind) != due}
        self._heard |= fresh
        self._heard_at |= dict.fromkeys(fresh, now)
        self._timer.name(fresh, now)
        return fresh

    def _may_be_named(self, now: float) -> bool:
        """Most steps ask nobody: after one was named, none is for an interval. It was heard of a step later, which
        half an interval makes up for; where steps are longer than that, each asks."""
        return any(now - self._heard_at[kind] >= every / 2 for kind, every in self._every.items())

    def _name(self, step: int, now: float, keys: Keys) -> None:
        if due := [kind for kind, every in self._every.items() if self._timer.due(kind, every, now)]:
            self._timer.name(due, now)
            self._named |= dict.fromkeys(due, self._policy.next_due(step + 2))
            keys.set(_NAMED, json.dumps(self._named))
