"""What is simulated: the job, its tiers, and how often what fails."""

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
    """How often a tier gets a copy, and what one takes. Seconds."""

    every_steps: int
    blocked: float = 0.0
    """Taken from training by each."""
    latency: float = 0.0
    """Until a copy is safe; the next is not begun before."""
    read: float = 0.0
    """To restore from it."""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or min(self.blocked, self.latency, self.read) < 0:
            raise ValueError(f"{self}: every_steps must be 1 or more, and times not below 0")


@dataclass(frozen=True, slots=True)
class Simulated:
    """One job. A rank stands for all workers of a node."""

    nodes: int
    step_s: float
    tiers: Mapping[str, SimulatedTier]
    """Of `memory`, `peer`, `durable`."""
    rates: Rates
    """Failures per second of one node."""
    recovery: Recovery = field(default_factory=Recovery)
    spares: int = 0
    rack_nodes: int = 4
    """Nodes that a correlated failure takes."""
    domains: bool = False
    """Whether placement knows the racks."""
    redundant: bool = False
    """Whether every rank holds the same state, live."""
    replicas: int = 1
    parity: int | None = None
    """Nodes of a group that keeps parity in place of copies."""
    node_bytes: float = 0.0
    state_bytes: float = 0.0
    live_read_s: float = 0.0
    """To get the state from a rank that holds the same."""
    repair_s: float = 1800.0
    """Mean time until a lost node, or another in its place, is there again."""
    node_wait_s: float = 7200.0
    """How long the job waits for a node when no spare is left."""
    budgets: Budgets = field(default_factory=lambda: Budgets(ENOUGH, max_node_losses=ENOUGH, quarantine_after=ENOUGH))
    keep: int = 3
    """Durable checkpoints."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.spares < 0 or self.rack_nodes < 1 or not (0 < self.step_s < math.inf):
            raise ValueError(
                f"{self.nodes} nodes, {self.spares} spares, racks of {self.rack_nodes}, steps of {self.step_s} s: "
                "nothing to simulate"
            )


def simulated(scenario: Scenario, every: Mapping[str, int], **more: Any) -> Simulated:
    """The simulation of what a planner looked at, with these steps between saves."""
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
