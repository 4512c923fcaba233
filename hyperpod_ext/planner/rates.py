"""Failure rates: set by the user, counted in a job's history, or from a published run.

There are three classes: loss of a process (its node's memory stays), loss of a node with its memory, and loss of
several nodes at once (a rack or a switch, with all copies on these nodes).
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
    """Events that take several nodes, divided by all nodes."""
    source: str
    """Source of the numbers, as text."""

    def __post_init__(self) -> None:
        for name in ("process", "node", "correlated"):
            rate = getattr(self, name)
            if not (rate >= 0 and math.isfinite(rate)):
                raise ValueError(f"{name}: {rate} failures per second must be a number, 0 or more")

    def of_job(self, nodes: int) -> Rates:
        """Return the rates of this many nodes in total."""
        return self.times(nodes)

    def times(self, factor: float) -> Rates:
        """Return the rates multiplied by `factor`."""
        return Rates(self.process * factor, self.node * factor, self.correlated * factor, self.source)

    @property
    def total(self) -> float:
        return self.process + self.node + self.correlated


@dataclass(frozen=True, slots=True)
class Published:
    """A run with published failures."""

    name: str
    nodes: int
    days: float
    process: int
    node: int
    correlated: int
    source: str

    def rates(self) -> Rates:
        """Return failures per second of one node."""
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
    """Return the rates of a published run.

    Raises:
        NotFoundError: the run is unknown.
    """
    if name not in PUBLISHED:
        raise NotFoundError(f"there are no published rates {name!r}", hint=suggest(name, PUBLISHED))
    return PUBLISHED[name].rates()


@dataclass(frozen=True, slots=True)
class Fit:
    """A rate from a count of independent events in `exposure` seconds."""

    events: int
    exposure: float
    rate: float
    """Events per second. If there was no event, half an event is counted (Jeffreys' prior)."""
    low: float
    high: float
    """95 % confidence interval of the rate (Garwood's exact one)."""


def fit(events: int, exposure: float) -> Fit:
    """Estimate the rate from a number of events in `exposure` seconds.

    Raises:
        ValueError: a negative count, or no exposure.
    """
    if events < 0 or not (exposure > 0 and math.isfinite(exposure)):
        raise ValueError(f"{events} events in {exposure} s: a rate needs a positive time, and a count of 0 or more")
    low = 0.0 if events == 0 else _mean_with(events - 1, 0.975)
    high = _mean_with(events, 0.025)
    return Fit(events, exposure, (events or 0.5) / exposure, low / exposure, high / exposure)


def _mean_with(events: int, chance: float) -> float:
    """Return the mean of a Poisson distribution that has at most `events` with this probability."""
    low, high = 0.0, 10.0 + 2 * events + 10 * math.sqrt(events)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(events, middle) > chance else (low, middle)
        if high - low <= 1e-12 * high:
            break
    return (low + high) / 2


def _at_most(events: int, mean: float) -> float:
    """Return the probability that a Poisson variable is at most `events`."""
    if mean <= 0:
        return 1.0
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(events + 1)]
    top = max(logs)
    return min(1.0, math.exp(top) * math.fsum(math.exp(log - top) for log in logs))
