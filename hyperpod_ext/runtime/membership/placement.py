"""Chooses the nodes that hold replicas (copies) of each node's snapshots. Pure functions of node numbers.

Nodes form groups of `replicas` + 1 nodes that hold copies of each other's snapshots. If k of N nodes are lost at once,
the probability that at least one copy of every snapshot remains is at least

    1 - N * C(N - m, k - m) / (m * C(N, k))        m = replicas + 1, m <= k < 2m, m divides N

(GEMINI, SOSP 2023). For example, if two of 16 nodes are lost, the probability is 93.3 % if the nodes form pairs, and
86.7 % in one ring of all 16 nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

Placement = dict[int, tuple[int, ...]]
"""The nodes that hold copies of each node's snapshots."""


def place_replicas(
    nodes: Mapping[int, str], replicas: int, before: Mapping[int, tuple[int, ...]] | None = None
) -> Placement:
    """Choose the nodes that hold the copies of each node's snapshots.

    If all nodes that hold a node's copies in `before` remain, they keep these copies, so that few copies move after a
    loss. Copies are placed in other failure domains than their owner, if other domains have room. A node holds the
    copies of at most replicas + 1 other nodes. If there are too few nodes for `replicas` copies, each node gets as many
    copies as possible.

    Args:
        nodes: maps each node to its failure domain (a rack or an availability zone).
        before: the previous placement; None if there is no previous placement.

    Raises:
        ValueError: `replicas` is less than one.
    """
    if replicas < 1:
        raise ValueError(f"{replicas} replicas: at least one copy is needed for a placement")
    wanted = min(replicas, len(nodes) - 1)
    kept = {
        node: holders
        for node, holders in sorted((before or {}).items())
        if node in nodes and len(holders) == wanted and node not in holders and all(h in nodes for h in holders)
    }
    movers = [node for node in sorted(nodes) if node not in kept]
    placed: Placement = dict(kept) if kept else _rings(nodes, replicas, wanted)
    load = Counter(holder for holders in placed.values() for holder in holders)
    several = len(set(nodes.values())) > 1
    for node in movers:
        if node in placed and (not several or _apart(node, nodes, placed[node])):
            continue
        placed[node] = _holders(node, nodes, placed.get(node, ()), load, wanted, most=replicas + 1)
    _relieve(placed, movers, nodes, load, most=replicas + 1)
    return dict(sorted(placed.items()))


def _rings(nodes: Mapping[int, str], replicas: int, wanted: int) -> Placement:
    """Place copies within groups of `replicas` + 1 nodes. Some groups are larger if the nodes cannot be divided
    equally.

    Each group is a ring, in which the next nodes after a node hold the node's copies. Neighbours in a ring are far
    apart in the list of nodes sorted by failure domain, so that they are in different domains if possible.
    """
    sizes = Counter(nodes.values())
    by_domain = sorted(nodes, key=lambda node: (-sizes[nodes[node]], nodes[node], node))
    groups = max(1, len(nodes) // (replicas + 1))
    placed: Placement = {}
    for first in range(groups):
        ring = by_domain[first::groups]
        for place, node in enumerate(ring):
            placed[node] = tuple(ring[(place + step) % len(ring)] for step in range(1, wanted + 1))
    return placed


def _apart(node: int, nodes: Mapping[int, str], holders: Sequence[int]) -> bool:
    return len({nodes[node], *(nodes[holder] for holder in holders)}) == 1 + len(holders)


def _relieve(placed: Placement, movers: Sequence[int], nodes: Mapping[int, str], load: Counter[int], most: int) -> None:
    """Move copies from nodes with more than `most` copies to nodes with fewer copies, but only copies whose owner is in
    `movers`. Without `_relieve`, perhaps only the node that is placed last would have room for its own copy."""
    while moves := [
        (nodes[roomy] in {nodes[owner], *(nodes[holder] for holder in placed[owner])}, owner, full, roomy)
        for owner in movers
        for full in placed[owner]
        if load[full] > most
        for roomy in nodes
        if load[roomy] < most and roomy != owner and roomy not in placed[owner]
    ]:
        _, owner, full, roomy = min(moves)
        placed[owner] = tuple(roomy if holder == full else holder for holder in placed[owner])
        load[full] -= 1
        load[roomy] += 1


def _holders(
    node: int, nodes: Mapping[int, str], now: Sequence[int], load: Counter[int], wanted: int, most: int
) -> tuple[int, ...]:
    """Choose the nodes that hold the copies of `node`, and count these copies in `load`. Nodes in `now`, which hold the
    copies already, are kept if possible. A node in `now` is replaced only if it shares a failure domain with `node` or
    another holder, and another domain has room."""
    load.subtract(now)
    holders: list[int] = []
    around = max(nodes) + 1
    for _ in range(wanted):
        domains = {nodes[node], *(nodes[holder] for holder in holders)}
        others = [other for other in nodes if other != node and other not in holders]
        best = min(
            others,
            key=lambda other: (
                load[other] >= most,
                nodes[other] in domains,
                other not in now,
                load[other],
                (other - node) % around,
            ),
        )
        holders.append(best)
        load[best] += 1
    return tuple(holders)
