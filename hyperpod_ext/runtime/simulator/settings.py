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
    """How often snapshots are copied to a tier, and how long a copy takes. Times are in seconds."""

    every_steps: int
    blocked: float = 0.0
    """Time in seconds for which each copy blocks training."""
    latency: float = 0.0
    """Time in seconds until a copy is safe. The next copy to the tier does not start before the copy is safe."""
    read: float = 0.0
    """Time in seconds to restore from the tier."""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or min(self.blocked, self.latency, self.read) < 0:
            raise ValueError(f"{self}: every_steps must be 1 or more, and times not below 0")


@dataclass(frozen=True, slots=True)
class Simulated:
    """Settings of one simulated job. One rank represents all workers of a node."""

    nodes: int
    step_s: float
    tiers: Mapping[str, SimulatedTier]
    """Tiers by name: `memory`, `disk`, `peer`, `durable`."""
    rates: Rates
    """Failure rates of one node, in failures per second."""
    recovery: Recovery = field(default_factory=Recovery)
    spares: int = 0
    rack_nodes: int = 4
    """Number of nodes in a rack. A correlated failure hits all nodes of a rack."""
    domains: bool = False
    """Whether the racks are known when copies are placed, so that a copy is in another rack."""
    redundant: bool = False
    """Whether all ranks have the same state, so that a rank can restore from any other rank."""
    replicas: int = 1
    parity: int | None = None
    """Number of nodes in a group that stores parity instead of copies. The value is None if the job stores copies."""
    node_bytes: float = 0.0
    state_bytes: float = 0.0
    live_read_s: float = 0.0
    """Time in seconds to get the state from another rank that has the same state."""
    repair_s: float = 1800.0
    """Mean time in seconds until a lost node, or a node that replaces it, is available."""
    node_wait_s: float = 7200.0
    """Time in seconds that the job waits for a node when no spare is left."""
    budgets: Budgets = field(default_factory=lambda: Budgets(ENOUGH, max_node_losses=ENOUGH, quarantine_after=ENOUGH))
    keep: int = 3
    """Number of durable checkpoints that are kept."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.spares < 0 or self.rack_nodes < 1 or not (0 < self.step_s < math.inf):
            raise ValueError(
                f"{self.nodes} nodes, {self.spares} spares, racks of {self.rack_nodes}, steps of {self.step_s} s: "
                "nothing to simulate"
            )


def simulated(scenario: Scenario, every: Mapping[str, int], **more: Any) -> Simulated:
    """Return the settings to simulate a scenario of the planner. `every`: steps between two copies, by kind of tier."""
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
