"""Computes the mean time that a job waits for a node after a failure. With enough spares, the wait for a failure is 0.
Pure."""

from __future__ import annotations

from dataclasses import dataclass

_LARGE = 1e200


@dataclass(frozen=True, slots=True)
class Waits:
    """Mean seconds that the job waits for a repaired node after the failure of a node or a rack."""

    node: float = 0.0
    rack: float = 0.0


def waits_for_nodes(node_rate: float, rack_rate: float, rack_nodes: int, spares: int, repair_s: float) -> Waits:
    """Return the mean seconds that a job waits for a node after the failure of one node, and after the failure of a
    rack.

    The number of nodes in repair is modelled as a Markov chain. Each failure of a node takes one spare, each failure of
    a rack takes several spares, and each failed node is repaired after `repair_s` seconds on average. If a failure
    finds too few spares, the job stops until enough nodes are repaired. At most `spares` nodes are in repair while the
    job trains, because the job stops if more nodes fail.

    Args:
        node_rate, rack_rate: failures per second of nodes and of racks, in the whole job.
        rack_nodes: number of nodes that the failure of a rack loses.
        spares: number of spare nodes.
        repair_s: mean seconds until a failed node is repaired or replaced.
    """
    # weights[n] is proportional to the probability that n nodes are in repair; in equilibrium, repairs that leave state
    # n are as frequent as failures that lead to state n
    weights = [1.0]
    for down in range(1, spares + 1):
        from_below = node_rate * weights[-1] + rack_rate * sum(weights[max(0, down - rack_nodes) :])
        weights.append(from_below * repair_s / down)
        if weights[-1] > _LARGE:
            weights = [weight / _LARGE for weight in weights]
    # with n nodes in repair, the next repair is done after repair_s / n seconds on average; until[n] is the mean time
    # until the number of nodes in repair has fallen from n to `spares`
    until = [0.0] * (spares + 1)
    for down in range(spares + 1, spares + rack_nodes + 1):
        until.append(until[-1] + repair_s / down)

    def mean_wait(nodes: int) -> float:
        return sum(weight * until[down + nodes] for down, weight in enumerate(weights)) / sum(weights)

    return Waits(mean_wait(1), mean_wait(rack_nodes))
