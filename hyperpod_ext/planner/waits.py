"""Mean waits for a node when no spare is left. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_LARGE = 1e200


@dataclass(frozen=True, slots=True)
class Waits:
    """Mean seconds that one failure waits for a repaired node."""

    node: float = 0.0
    rack: float = 0.0


def waits_for_nodes(node_rate: float, rack_rate: float, rack_nodes: int, spares: int, repair_s: float) -> Waits:
    """Return the mean wait of a node's failure, and of a rack's.

    Nodes in repair form a Markov chain: each failure of a node takes one spare, that of a rack several, and each node
    comes back after `repair_s` on average. A failure that finds too few spares stops the job until enough nodes are
    back, so at most `spares` nodes are in repair while the job trains.

    Args:
        node_rate, rack_rate: failures per second of the whole job.
        rack_nodes: nodes that a rack's failure takes.
        repair_s: mean time until a failed node, or another in its place, is back.
    """
    weights = [1.0]  # of `index` nodes in repair; repairs from there balance failures that lead there
    for down in range(1, spares + 1):
        from_below = node_rate * weights[-1] + rack_rate * sum(weights[max(0, down - rack_nodes) :])
        weights.append(from_below * repair_s / down)
        if weights[-1] > _LARGE:
            weights = [weight / _LARGE for weight in weights]
    # of n nodes in repair the first is back after repair_s / n: until[n] is the wait from n down to `spares`
    until = [0.0] * (spares + 1)
    for down in range(spares + 1, spares + rack_nodes + 1):
        until.append(until[-1] + repair_s / down)

    def mean_wait(nodes: int) -> float:
        return sum(weight * until[down + nodes] for down, weight in enumerate(weights)) / sum(weights)

    return Waits(mean_wait(1), mean_wait(rack_nodes))
