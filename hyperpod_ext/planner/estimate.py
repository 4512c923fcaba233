"""Estimates a job's goodput, lost steps and lost dollars, as planned and for variants of the job that lack a feature.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hyperpod_ext.planner.intervals import lost_per_failure
from hyperpod_ext.planner.levels import Level, best_schedule, total_goodput
from hyperpod_ext.planner.recovery_tiers import Kind, Scenario, rates_by_tier, recovery_costs

HOURS_A_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class TierEstimate:
    """The part of an estimate about one tier. Times are in seconds. Rates are failures per second in the whole job."""

    kind: Kind
    every_steps: int | None
    """Steps between saves to the tier. None for the kinds `live` and `nothing`, to which nothing is saved."""
    level: Level
    interval_s: float
    by_class: Mapping[str, float]
    lost_steps: float
    """Mean number of steps that a failure loses if this tier recovers it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "tier": self.kind,
            "every_steps": self.every_steps,
            "interval_s": round(self.interval_s, 3),
            "blocked_s": round(self.level.cost, 6),
            "latency_s": round(self.level.latency, 3),
            "restart_s": round(self.level.restart, 3),
            "failures_a_day": {name: round(rate * 86400, 6) for name, rate in self.by_class.items()},
            "lost_steps_a_failure": round(self.lost_steps, 2),
        }


@dataclass(frozen=True, slots=True)
class GoodputEstimate:
    """Expected goodput of a job with given intervals between saves."""

    tiers: tuple[TierEstimate, ...]
    goodput: float

    @property
    def failures_a_month(self) -> float:
        return sum(tier.level.rate for tier in self.tiers) * 3600 * HOURS_A_MONTH

    @property
    def lost_steps_a_month(self) -> float:
        return sum(tier.level.rate * tier.lost_steps for tier in self.tiers) * 3600 * HOURS_A_MONTH

    def every(self) -> dict[str, int]:
        """Return the number of steps between saves for each tier, by the tier's kind."""
        return {tier.kind: tier.every_steps for tier in self.tiers if tier.every_steps is not None}

    def dollars(self, usd_per_hour: float) -> dict[str, float]:
        """Return the dollars that are lost per month and per failure.

        Args:
            usd_per_hour: price of all nodes together.
        """
        month = (1 - self.goodput) * HOURS_A_MONTH * usd_per_hour
        failures = self.failures_a_month
        return {"a_month": round(month, 2), "a_failure": round(month / failures, 2) if failures else 0.0}

    def to_json(self, usd_per_hour: float | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "goodput": round(self.goodput, 6),
            "failures_a_month": round(self.failures_a_month, 3),
            "lost_steps_a_month": round(self.lost_steps_a_month, 1),
            "tiers": [tier.to_json() for tier in self.tiers],
        }
        return found if usd_per_hour is None else found | {"usd_lost": self.dollars(usd_per_hour)}


def look_ahead(scenario: Scenario, every: Mapping[str, int] | None = None) -> GoodputEstimate:
    """Estimate the goodput of a job.

    Args:
        every: number of steps between saves, by the tier's kind. None: the best numbers of steps are computed.

    Raises:
        ValueError: a step takes no time, or an interval is below one step.
    """
    levels = recovery_costs(scenario)
    most = max(1, int(scenario.run_s / scenario.step_s))
    fixed: dict[Kind, float] = {"live": scenario.step_s, "nothing": scenario.run_s}
    open_tiers = [kind for kind in levels if kind not in fixed]
    if every is None and open_tiers:
        best = best_schedule([levels[kind] for kind in open_tiers], scenario.step_s, most)
        every = dict(zip(open_tiers, best.every, strict=True))
    steps = {kind: min(most, (every or {})[kind]) for kind in open_tiers}
    intervals = {
        kind: fixed[kind] if kind in fixed else _arriving(steps[kind] * scenario.step_s, level)
        for kind, level in levels.items()
    }
    by_tier = rates_by_tier(scenario)
    tiers = tuple(
        TierEstimate(
            kind,
            steps.get(kind),
            level,
            intervals[kind],
            by_tier.get(kind, {}),
            lost_per_failure(intervals[kind], level.cost, level.mtbf, latency=level.latency) / scenario.step_s,
        )
        for kind, level in levels.items()
    )
    return GoodputEstimate(tiers, total_goodput([*levels.values()], [intervals[kind] for kind in levels]))


def _arriving(interval: float, level: Level) -> float:
    """Return the interval in seconds at which copies arrive in a tier. If a copy takes longer than `interval`, saves
    are skipped until the copy is complete."""
    period = interval + level.cost
    return interval * max(1, -(-level.latency // period)) if level.latency > period else interval


def without_each(scenario: Scenario) -> dict[str, GoodputEstimate]:
    """Estimate the goodput of a job with its best intervals, and of variants of the job that lack a feature of this
    project. The keys of the result describe the variants, such as `without copies on peers`."""
    scenarios = {"as planned": scenario}
    if scenario.in_process:
        scenarios["every fault restarts the job"] = replace(scenario, in_process=False)
    if "peer" in scenario.tiers and not scenario.spread.redundant and scenario.spread.nodes > 1:
        scenarios["without copies on peers"] = replace(scenario, tiers=scenario.tiers - {"peer"})
    if scenario.tiers & {"memory", "peer"} and "durable" in scenario.tiers:
        scenarios["checkpoints in storage alone"] = replace(scenario, tiers=frozenset({"durable"}))
    return {name: look_ahead(one) for name, one in scenarios.items()}
