"""How often things fail: given, counted in a job's own history, or from a published run.

Three classes, by what is lost: a process (its node's memory stays), a node (its memory is gone), several nodes at
once (a rack, a switch: copies that lie together are gone together).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hyperpod_ext.config.files.nearest import suggest
from hyperpod_ext.errors import NotFoundError

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Failures per second of one node, by class."""

    process: float
    node: float
    correlated: float
    """Events that take several nodes, for each node there is."""
    source: str
    """Where the numbers come from, for people."""

    def __post_init__(self) -> None:
        for name in ("process", "node", "correlated"):
            rate = getattr(self, name)
            if not (rate >= 0 and math.isfinite(rate)):
                raise ValueError(f"{name}: {rate} failures a second; it must be a number, 0 or more")

    def of_job(self, nodes: int) -> Rates:
        """Of so many nodes together."""
        return self.times(nodes)

    def times(self, factor: float) -> Rates:
        """So many times as often."""
        return Rates(self.process * factor, self.node * factor, self.correlated * factor, self.source)

    @property
    def total(self) -> float:
        return self.process + self.node + self.correlated


@dataclass(frozen=True, slots=True)
class Published:
    """A run that was written about."""

    name: str
    nodes: int
    days: float
    process: int
    node: int
    correlated: int
    source: str

    def rates(self) -> Rates:
        """Failures per second of one node of it."""
        counts = Rates(self.process, self.node, self.correlated, self.source)
        return counts.times(1 / (self.nodes * self.days * DAY_S))


PUBLISHED: Mapping[str, Published] = {
    "llama3-405b": Published(
        "llama3-405b",
        nodes=2048,
        days=54,
        process=63,
        node=321,
        correlated=35,
        source="The Llama 3 Herd of Models (2024), table 5: 419 unexpected interruptions in 54 days on 16,384 H100. "
        "Classed here: software, NCCL timeouts and dependencies as process (63), network switches and cables as "
        "correlated (35), the rest as node (321)",
    ),
}
"""Runs whose failures were published, by name."""


def published(name: str) -> Rates:
    """Rates of a published run.

    Raises:
        NotFoundError: it is not known here.
    """
    if name not in PUBLISHED:
        raise NotFoundError(f"there are no published rates {name!r} here", hint=suggest(name, PUBLISHED))
    return PUBLISHED[name].rates()


@dataclass(frozen=True, slots=True)
class Fit:
    """A rate from a count: events that come independently of one another, in `exposure` seconds."""

    events: int
    exposure: float
    rate: float
    """Events per second. Of no event: half of one, which is what can be said (Jeffreys' prior)."""
    low: float
    high: float
    """The rate lies between these with 95 % confidence (Garwood's exact interval)."""


def fit(events: int, exposure: float) -> Fit:
    """The rate behind so many events in so many seconds.

    Raises:
        ValueError: fewer than no events, or no time in which they could have come.
    """
    if events < 0 or not (exposure > 0 and math.isfinite(exposure)):
        raise ValueError(f"{events} events in {exposure} s: a rate needs time to be seen in, and a count of 0 or more")
    low = 0.0 if events == 0 else _mean_with(events - 1, 0.975)
    high = _mean_with(events, 0.025)
    return Fit(events, exposure, (events or 0.5) / exposure, low / exposure, high / exposure)


def _mean_with(events: int, chance: float) -> float:
    """The mean of a Poisson distribution of which at most `events` come with this chance."""
    low, high = 0.0, 10.0 + 2 * events + 10 * math.sqrt(events)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(events, middle) > chance else (low, middle)
        if high - low <= 1e-12 * high:
            break
    return (low + high) / 2


def _at_most(events: int, mean: float) -> float:
    """The chance that a Poisson variable is at most `events`."""
    if mean <= 0:
        return 1.0
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(events + 1)]
    top = max(logs)
    return min(1.0, math.exp(top) * math.fsum(math.exp(log - top) for log in logs))
