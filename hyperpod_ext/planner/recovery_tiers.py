"""Which tier each class of failure falls back to, and so what each tier's level is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hyperpod_ext.planner.costs import Speeds, Spread, TierCost, durable_cost, memory_cost, peer_cost
from hyperpod_ext.planner.levels import Level
from hyperpod_ext.planner.rates import Rates

Kind = Literal["live", "memory", "peer", "durable", "nothing"]
FailureClass = Literal["process", "node", "correlated"]
NEAREST_FIRST: tuple[Kind, ...] = ("live", "memory", "peer", "durable", "nothing")


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from a failure until training goes on, without reading state and without work made again."""

    process: float = 5.0
    """A process is replaced, the others stay."""
    node: float = 30.0
    """A spare takes a lost node's ranks."""
    job: float = 600.0
    """The whole job ends and is started again."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """How a job is protected: everything that its goodput follows from."""

    spread: Spread
    step_s: float
    rates: Rates
    """Of the whole job, per second."""
    tiers: frozenset[str]
    """Of `memory`, `peer`, `durable`."""
    speeds: Speeds = field(default_factory=Speeds)
    recovery: Recovery = field(default_factory=Recovery)
    overlap: bool = True
    replicas: int = 1
    max_slowdown: float = 0.05
    in_process: bool = True
    """Whether survivors stay; else every failure ends the job, which is started again."""
    domains: bool = False
    """Whether failure domains are known, so that copies lie in another one."""
    run_s: float = 30 * 86400.0
    """How long the run is: what is lost where nothing is saved."""

    def __post_init__(self) -> None:
        if not self.step_s > 0 or not self.run_s > 0:
            raise ValueError(f"steps of {self.step_s} s, a run of {self.run_s} s: both must be above 0")


def tier_of(failure: FailureClass, scenario: Scenario) -> Kind:
    """The nearest tier that survives this class of failure."""
    live = scenario.spread.redundant and scenario.in_process
    survives: Mapping[FailureClass, tuple[Kind, ...]] = {
        "process": ("live", "memory", "peer", "durable"),
        "node": ("live", "peer", "durable"),
        "correlated": ("live", "peer", "durable") if scenario.domains else ("durable",),
    }
    # a job that is started again begins with empty memory
    there = {*scenario.tiers, *(["live"] if live else [])} if scenario.in_process else {*scenario.tiers} & {"durable"}
    if scenario.spread.nodes == 1:
        there.discard("peer")
    return next((kind for kind in survives[failure] if kind in there), "nothing")


def rates_by_tier(scenario: Scenario) -> dict[Kind, dict[str, float]]:
    """Failures per second that fall back to each tier, by class. `second loss` is that of the last copy before it was
    made again."""
    found: dict[Kind, dict[str, float]] = {}
    classes: tuple[FailureClass, ...] = ("process", "node", "correlated")
    for failure in classes:
        found.setdefault(tier_of(failure, scenario), {})[failure] = getattr(scenario.rates, failure)
    near = tier_of("node", scenario)
    if near in ("live", "peer"):
        farther: Kind = "durable" if "durable" in scenario.tiers else "nothing"
        copies = scenario.replicas if near == "peer" else 1
        window = scenario.recovery.node + (
            costs_of(scenario)["peer"].latency_s if near == "peer" else costs_of(scenario)["live"].read_s
        )
        each = scenario.rates.node / scenario.spread.nodes
        found.setdefault(farther, {})["second loss"] = scenario.rates.node * (each * window) ** copies
    return found


def costs_of(scenario: Scenario) -> dict[str, TierCost]:
    """What one save to each tier takes."""
    spread, speeds = scenario.spread, scenario.speeds
    return {
        "live": TierCost(0.0, 0.0, spread.node_bytes / speeds.peer),
        "memory": memory_cost(spread, speeds, overlap=scenario.overlap),
        "peer": peer_cost(spread, speeds, scenario.replicas, scenario.max_slowdown),
        "durable": durable_cost(spread, speeds),
        "nothing": TierCost(0.0, 0.0, 0.0),
    }


def recovery_costs(scenario: Scenario) -> dict[Kind, Level]:
    """A level for each tier that there is, and for failures that none survives. Nearest first."""
    costs, rates = costs_of(scenario), rates_by_tier(scenario)
    levels: dict[Kind, Level] = {}
    for kind in NEAREST_FIRST:
        by_class, cost = rates.get(kind, {}), costs[kind]
        if kind not in scenario.tiers and not sum(by_class.values()):
            continue
        if kind == "peer" and (scenario.spread.nodes == 1 or scenario.spread.redundant):
            continue  # nothing is sent
        blocked = cost.blocked_s
        if kind in scenario.tiers - {"memory"} and not levels.keys() & scenario.tiers:
            blocked += costs["memory"].blocked_s  # the snapshot itself, which a nearer tier would have taken
        restart = _restart(scenario, by_class) + cost.read_s
        levels[kind] = Level(kind, blocked, sum(by_class.values()), cost.latency_s, restart)
    return levels


def _restart(scenario: Scenario, by_class: Mapping[str, float]) -> float:
    """Mean time to go on, over the classes that come here."""
    total = sum(by_class.values())
    if not scenario.in_process:
        return scenario.recovery.job
    took = {"process": scenario.recovery.process, "node": scenario.recovery.node, "correlated": scenario.recovery.node}
    if not total:
        return scenario.recovery.node
    return sum(rate * took.get(failure, scenario.recovery.job) for failure, rate in by_class.items()) / total
