"""Mean waits for a node when no spare is left. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_LARGE = 1e200


@dataclass(frozen=True, slots=True)
class Waits:
    """Mean seconds that the job waits for a repaired node after one failure."""

    node: float = 0.0
    rack: float = 0.0


def waits_for_nodes(node_rate: float, rack_rate: float, rack_nodes: int, spares: int, repair_s: float) -> Waits:
    """Return the mean wait after a node's failure, and after a rack's failure.

    Nodes in repair form a Markov chain: each failure of a node takes one spare, each failure of a rack several, and
    each node is repaired after `repair_s` on average. A failure with too few spares stops the job until enough nodes
    are repaired, so at most `spares` nodes are in repair while the job trains.

    Args:
        node_rate, rack_rate: failures per second of the whole job.
        rack_nodes: nodes that a rack's failure takes.
        repair_s: mean time until a failed node is repaired or replaced.
    """
    weights = [1.0]  # probability of `index` nodes in repair: repairs from this state balance failures that lead to it
    for down in range(1, spares + 1):
        from_below = node_rate * weights[-1] + rack_rate * sum(weights[max(0, down - rack_nodes) :])
        weights.append(from_below * repair_s / down)
        if weights[-1] > _LARGE:
            weights = [weight / _LARGE for weight in weights]
    # the first of n nodes in repair is ready after repair_s / n; until[n] is the wait from n down to `spares`
    until = [0.0] * (spares + 1)
    for down in range(spares + 1, spares + rack_nodes + 1):
        until.append(until[-1] + repair_s / down)

    def mean_wait(nodes: int) -> float:
        return sum(weight * until[down + nodes] for down, weight in enumerate(weights)) / sum(weights)

    return Waits(mean_wait(1), mean_wait(rack_nodes))
