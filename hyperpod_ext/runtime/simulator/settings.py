"""Settings of a simulation: the job, its tiers, and the rates of failures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.planner.rates import Rates
from hyperpod_ext.planner.recovery_tiers import Recovery, Scenario, costs_of
from hyperpod_ext.runtime.membership.escalation import Budgets

ENOUGH = 1 << 30


@dataclass(frozen=True, slots=True)
class SimulatedTier:
    """How often a tier gets a copy, and how long a copy takes. Times are in seconds."""

    every_steps: int
    blocked: float = 0.0
    """Seconds that each copy takes from training."""
    latency: float = 0.0
    """Seconds until a copy is safe. The next copy does not begin before."""
    read: float = 0.0
    """Seconds to restore from the tier."""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or min(self.blocked, self.latency, self.read) < 0:
            raise ValueError(f"{self}: every_steps must be 1 or more, and times not below 0")


@dataclass(frozen=True, slots=True)
class Simulated:
    """One job. A rank represents all workers of a node."""

    nodes: int
    step_s: float
    tiers: Mapping[str, SimulatedTier]
    """Tiers by name: `memory`, `peer`, `durable`."""
    rates: Rates
    """Failures per second of one node."""
    recovery: Recovery = field(default_factory=Recovery)
    spares: int = 0
    rack_nodes: int = 4
    """Number of nodes that a correlated failure takes."""
    domains: bool = False
    """Whether the placement of copies knows the racks."""
    redundant: bool = False
    """Whether every rank holds the same live state."""
    replicas: int = 1
    parity: int | None = None
    """Number of nodes in a group that keeps parity instead of copies; None for copies."""
    node_bytes: float = 0.0
    state_bytes: float = 0.0
    live_read_s: float = 0.0
    """Seconds to get the state from another rank that holds the same state."""
    repair_s: float = 1800.0
    """Mean seconds until a lost node, or another node in its place, is available."""
    node_wait_s: float = 7200.0
    """Seconds that the job waits for a node when no spare is left."""
    budgets: Budgets = field(default_factory=lambda: Budgets(ENOUGH, max_node_losses=ENOUGH, quarantine_after=ENOUGH))
    keep: int = 3
    """Number of durable checkpoints to keep."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.spares < 0 or self.rack_nodes < 1 or not (0 < self.step_s < math.inf):
            raise ValueError(
                f"{self.nodes} nodes, {self.spares} spares, racks of {self.rack_nodes}, steps of {self.step_s} s: "
                "nothing to simulate"
            )


def simulated(scenario: Scenario, every: Mapping[str, int], **more: Any) -> Simulated:
    """Return the simulation of a planner's scenario, with these numbers of steps between saves."""
    costs = costs_of(scenario)
    tiers: dict[str, SimulatedTier] = {}
    for kind in ("memory", "disk", "peer", "durable"):
        if kind not in every or (kind == "peer" and (scenario.spread.redundant or scenario.spread.nodes == 1)):
            continue
        cost = costs[kind]
        snapshot = costs["memory"].blocked_s if kind != "memory" and not tiers else 0.0
        tiers[kind] = SimulatedTier(every[kind], cost.blocked_s + snapshot, cost.latency_s, cost.read_s)
    return Simulated(
        nodes=scenario.spread.nodes,
        step_s=scenario.step_s,
        tiers=tiers,
        rates=scenario.rates.times(1 / scenario.spread.nodes),
        recovery=scenario.recovery,
        redundant=scenario.spread.redundant,
        replicas=scenario.replicas,
        parity=scenario.parity,
        domains=scenario.domains,
        rack_nodes=scenario.rack_nodes,
        node_bytes=scenario.spread.node_bytes,
        state_bytes=scenario.spread.state_bytes,
        live_read_s=costs["live"].read_s,
        repair_s=scenario.repair_s,
        **({} if scenario.spares is None else {"spares": scenario.spares}) | more,
    )
