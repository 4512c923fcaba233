"""Failure rates of jobs, which the user sets, or which come from a job's history or from a published run.

There are three classes of failures. A `process` failure loses a process, but not the memory of its node. A `node`
failure loses a node with its memory. A `correlated` failure loses several nodes at once, for example a rack, with all
copies in their memory.
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
    """Failures per second by class, of one node or of a whole job."""

    process: float
    node: float
    correlated: float
    """Failures per second that lose several nodes at once. In the rates of one node, this number is the rate of the job
    divided by the job's number of nodes."""
    source: str
    """Description of where the rates come from."""

    def __post_init__(self) -> None:
        for name in ("process", "node", "correlated"):
            rate = getattr(self, name)
            if not (rate >= 0 and math.isfinite(rate)):
                raise ValueError(f"{name}: {rate} failures per second must be a number, 0 or more")

    def of_job(self, nodes: int) -> Rates:
        """Return the rates of a whole job with `nodes` nodes, from the rates of one node."""
        return self.times(nodes)

    def times(self, factor: float) -> Rates:
        """Return the rates multiplied by `factor`."""
        return Rates(self.process * factor, self.node * factor, self.correlated * factor, self.source)

    @property
    def total(self) -> float:
        return self.process + self.node + self.correlated


@dataclass(frozen=True, slots=True)
class Published:
    """Published numbers of failures in one training run."""

    name: str
    nodes: int
    days: float
    process: int
    node: int
    correlated: int
    source: str

    def rates(self) -> Rates:
        """Return the failures per second of one node in this run."""
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
"""Training runs with published numbers of failures, by name."""


def published(name: str) -> Rates:
    """Return the failure rates of one node in the published run `name`.

    Raises:
        NotFoundError: there is no published run with this name.
    """
    if name not in PUBLISHED:
        raise NotFoundError(f"there are no published rates {name!r}", hint=suggest(name, PUBLISHED))
    return PUBLISHED[name].rates()


@dataclass(frozen=True, slots=True)
class Fit:
    """A rate that is estimated from the number of independent events in `exposure` seconds."""

    events: int
    exposure: float
    rate: float
    """Estimated number of events per second. Zero events count as half an event (Jeffreys' prior)."""
    low: float
    high: float
    """Upper end of the 95 % confidence interval of the rate; `low` is the lower end (Garwood's exact interval)."""


def fit(events: int, exposure: float) -> Fit:
    """Estimate the rate from a number of events in `exposure` seconds.

    Raises:
        ValueError: `events` is negative, or `exposure` is not above 0.
    """
    if events < 0 or not (exposure > 0 and math.isfinite(exposure)):
        raise ValueError(f"{events} events in {exposure} s: a rate needs a positive time, and a count of 0 or more")
    low = 0.0 if events == 0 else _mean_with(events - 1, 0.975)
    high = _mean_with(events, 0.025)
    return Fit(events, exposure, (events or 0.5) / exposure, low / exposure, high / exposure)


def _mean_with(events: int, chance: float) -> float:
    """Return the mean of the Poisson distribution for which `events` or fewer events have the probability `chance`."""
    low, high = 0.0, 10.0 + 2 * events + 10 * math.sqrt(events)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(events, middle) > chance else (low, middle)
        if high - low <= 1e-12 * high:
            break
    return (low + high) / 2


def _at_most(events: int, mean: float) -> float:
    """Return the probability of `events` or fewer events for a Poisson distribution with the mean `mean`."""
    if mean <= 0:
        return 1.0
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(events + 1)]
    top = max(logs)
    return min(1.0, math.exp(top) * math.fsum(math.exp(log - top) for log in logs))
