"""Computes which tier recovers each class of failure, and the resulting costs and failure rates of the tiers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hyperpod_ext.planner import control_plane
from hyperpod_ext.planner.costs import (
    Speeds,
    Spread,
    TierCost,
    disk_cost,
    durable_cost,
    group_size,
    memory_cost,
    peer_cost,
)
from hyperpod_ext.planner.levels import Level
from hyperpod_ext.planner.rates import Rates
from hyperpod_ext.planner.waits import Waits, waits_for_nodes

Kind = Literal["live", "memory", "disk", "peer", "durable", "nothing"]
FailureClass = Literal["process", "node", "correlated"]
_LEAST_TOGETHER = 0.03
"""Minimum share of rack failures that lose a node together with all its copies. `hp-ext simulate` measured 0.03 to 0.04
on 4,096 and 16,384 nodes. Random placement would give a smaller share, but nodes that replace a lost rack are often in
one rack and hold each other's copies."""
NEAREST_FIRST: tuple[Kind, ...] = ("live", "memory", "disk", "peer", "durable", "nothing")


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from a failure until training resumes. The time to restore state and to repeat lost steps is not
    included."""

    process: float = 5.0
    """Seconds if one process is replaced and all other processes stay."""
    node: float = 30.0
    """Seconds if a spare takes over the ranks of a lost node."""
    job: float = 600.0
    """Seconds if the whole job ends and is started again."""

    @classmethod
    def at(cls, nodes: int) -> Recovery:
        """Return default times for a job with `nodes` nodes: assumed times of scripts and devices, plus measured times
        of the control plane."""
        assumed, measured = cls(), control_plane.at(nodes)
        return cls(assumed.process + measured.fault_s, assumed.node + measured.fault_s, assumed.job + measured.start_s)


@dataclass(frozen=True, slots=True)
class Scenario:
    """All properties of a job that determine its goodput."""

    spread: Spread
    step_s: float
    rates: Rates
    """Failures per second of the whole job."""
    tiers: frozenset[str]
    """Kinds of tiers that the job uses: any of `memory`, `disk`, `peer` and `durable`."""
    speeds: Speeds = field(default_factory=Speeds)
    recovery: Recovery = field(default_factory=Recovery)
    overlap: bool = True
    replicas: int = 1
    parity: int | None = None
    """Number of nodes in a parity group of the peer tier. None: the peer tier uses copies instead of parity."""
    max_slowdown: float = 0.05
    in_process: bool = True
    """Whether healthy processes stay alive after a failure. False: every failure restarts the whole job."""
    domains: bool = False
    """Whether copies of a node's state are stored in another failure domain (rack) than the node."""
    rack_nodes: int = 4
    """Number of nodes that a correlated failure loses at once."""
    run_s: float = 30 * 86400.0
    """Length of the run in seconds. If nothing is saved, a failure loses all work of the run so far."""
    spares: int | None = None
    """Number of spare nodes. None: the job never waits for a spare node, like an elastic job, which continues with
    fewer nodes."""
    repair_s: float = 1800.0
    """Mean seconds until a lost node is repaired, or replaced by the platform."""

    def __post_init__(self) -> None:
        if not self.step_s > 0 or not self.run_s > 0:
            raise ValueError(f"steps of {self.step_s} s, a run of {self.run_s} s must both be above 0")


def tier_of(failure: FailureClass, scenario: Scenario) -> Kind:
    """Return the kind of the nearest tier that survives every failure of the class `failure`."""
    live = scenario.spread.redundant and scenario.in_process
    survives: Mapping[FailureClass, tuple[Kind, ...]] = {
        "process": ("live", "memory", "disk", "peer", "durable"),
        # redundant state: another node's disk has the state of the lost node
        "node": ("live", *(("disk",) if scenario.spread.redundant else ()), "peer", "durable"),
        "correlated": ("live", "peer", "durable") if scenario.domains else ("durable",),
    }
    # without in-process recovery, each fault ends the job, and so deletes the snapshots in memory
    there = {*scenario.tiers, *(["live"] if live else [])}
    there = there if scenario.in_process else there & {"disk", "durable"}
    if scenario.spread.nodes == 1:
        there.discard("peer")
    return next((kind for kind in survives[failure] if kind in there), "nothing")


def rates_by_tier(scenario: Scenario) -> dict[Kind, dict[str, float]]:
    """Return the failures per second that each tier recovers, by tier and class of failure. The class `second loss` is
    the loss of a node and of the last copy of its state before the copy is replaced."""
    found: dict[Kind, dict[str, float]] = {}
    classes: tuple[FailureClass, ...] = ("process", "node", "correlated")
    for failure in classes:
        found.setdefault(tier_of(failure, scenario), {})[failure] = getattr(scenario.rates, failure)
    near, sure = tier_of("node", scenario), tier_of("correlated", scenario)
    if sure != near:  # most correlated failures leave a copy of each node's state in the nearer tier
        rate, together = scenario.rates.correlated, chance_together(scenario)
        found.setdefault(near, {})["correlated"] = rate * (1 - together)
        found[sure]["correlated"] = rate * together
    if near in ("live", "peer"):
        farther: Kind = "durable" if "durable" in scenario.tiers else "nothing"
        copies = scenario.replicas if near == "peer" else 1
        # `others`: number of nodes whose failure would lose the copy: 1 for a replica, all others of the group for
        # parity
        others = group_size(scenario.spread.nodes, scenario.parity) - 1 if near == "peer" and scenario.parity else 1
        window = scenario.recovery.node + (
            costs_of(scenario)["peer"].latency_s if near == "peer" else costs_of(scenario)["live"].read_s
        )
        each = scenario.rates.node / scenario.spread.nodes
        found.setdefault(farther, {})["second loss"] = scenario.rates.node * (others * each * window) ** copies
    return found


def chance_together(scenario: Scenario) -> float:
    """Return the probability that a rack contains a node and all copies of the node's state, if the job does not know
    its racks.

    The result is the probability for random placement of the copies (formula in `runtime/membership/placement.py`). For
    copies in the peer tier, the result is at least the simulated share `_LEAST_TOGETHER`.
    """
    nodes, rack = scenario.spread.nodes, min(scenario.rack_nodes, scenario.spread.nodes)
    if scenario.parity and not scenario.spread.redundant:  # losing two nodes of a parity group loses their state
        group = group_size(nodes, scenario.parity)
        pairs = nodes / group * math.comb(group, 2)
        return max(min(1.0, pairs * math.comb(rack, 2) / math.comb(nodes, 2)), _LEAST_TOGETHER)
    if scenario.spread.redundant:
        copies = nodes * scenario.spread.workers_per_node // scenario.spread.ranks_per_copy
    else:
        copies = 1 + scenario.replicas
    copies = min(copies, nodes)
    at_random = min(1.0, nodes / copies * math.comb(rack, copies) / math.comb(nodes, copies))
    return at_random if scenario.spread.redundant or rack < copies else max(at_random, _LEAST_TOGETHER)


def costs_of(scenario: Scenario) -> dict[str, TierCost]:
    """Return the cost of one save to each tier, by the kind of the tier."""
    spread, speeds = scenario.spread, scenario.speeds
    return {
        "live": TierCost(0.0, 0.0, spread.node_bytes / speeds.peer),
        "memory": memory_cost(spread, speeds, overlap=scenario.overlap),
        "peer": peer_cost(spread, speeds, scenario.replicas, scenario.max_slowdown, scenario.parity),
        "disk": disk_cost(spread, speeds),
        "durable": durable_cost(spread, speeds),
        "nothing": TierCost(0.0, 0.0, 0.0),
    }


def recovery_costs(scenario: Scenario) -> dict[Kind, Level]:
    """Return the costs and the failure rate of each tier of the job, nearest tier first. The kind `nothing` stands for
    failures that no tier survives."""
    costs, rates = costs_of(scenario), rates_by_tier(scenario)
    levels: dict[Kind, Level] = {}
    for kind in NEAREST_FIRST:
        by_class, cost = rates.get(kind, {}), costs[kind]
        if kind not in scenario.tiers and not sum(by_class.values()):
            continue
        if kind == "peer" and (scenario.spread.nodes == 1 or scenario.spread.redundant):
            continue  # no peer tier: the job sends no snapshots to other nodes
        blocked = cost.blocked_s
        if kind in scenario.tiers - {"memory"} and not levels.keys() & scenario.tiers:
            blocked += costs["memory"].blocked_s  # add the cost of the snapshot itself to the nearest tier
        restart = _restart(scenario, by_class) + cost.read_s
        levels[kind] = Level(kind, blocked, sum(by_class.values()), cost.latency_s, restart)
    return levels


def waits_of(scenario: Scenario) -> Waits:
    """Return the mean seconds that the job waits for a node after a failure. Failures with enough spares count as
    zero."""
    if scenario.spares is None:
        return Waits()
    rack = min(scenario.rack_nodes, scenario.spread.nodes)
    return waits_for_nodes(scenario.rates.node, scenario.rates.correlated, rack, scenario.spares, scenario.repair_s)


def _restart(scenario: Scenario, by_class: Mapping[str, float]) -> float:
    """Return the mean seconds from a failure until training continues, over the failures that one tier recovers.

    Args:
        by_class: failures per second that the tier recovers, by class.
    """
    total, recovery, waits = sum(by_class.values()), scenario.recovery, waits_of(scenario)
    if not total:
        return recovery.node if scenario.in_process else recovery.job
    waited = {"node": waits.node, "correlated": waits.rack, "second loss": waits.node}
    took = {"process": recovery.process, "node": recovery.node, "correlated": recovery.node}
    if not scenario.in_process:
        took = {}  # every failure restarts the whole job
    each = {failure: took.get(failure, recovery.job) + waited.get(failure, 0.0) for failure in by_class}
    return sum(rate * each[failure] for failure, rate in by_class.items()) / total
