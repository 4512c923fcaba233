"""Divides nodes into parity groups, in which each node stores parity (XOR) of the other nodes' snapshots. Pure
functions of node numbers.

A parity group can rebuild the snapshots of one lost node, but not of two lost nodes. The nodes of a group are spread
over as many failure domains (racks or availability zones) as possible, so that, if possible, a lost rack costs each
group at most one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.errors import Problem

Group = tuple[int, ...]
"""Numbers of the nodes of a parity group, in ascending order."""


def place_groups(nodes: Mapping[int, str], size: int, before: Sequence[Group] = ()) -> tuple[Group, ...]:
    """Divide nodes into parity groups of at least `size` nodes. Returns no group if there are fewer than `size` nodes.

    Some groups are larger if the number of nodes is not a multiple of `size`. If possible, the remaining nodes of each
    group in `before` (the earlier groups) stay together, and new nodes replace lost nodes.

    Args:
        nodes: failure domain (rack or availability zone) of each node.

    Raises:
        ValueError: `size` is less than 3, which is too few nodes for parity.
    """
    if size < 3:
        raise ValueError(f"parity groups of {size} nodes are too small: at least 3 nodes are needed")
    if len(nodes) < size:
        return ()
    count = len(nodes) // size
    groups = [[node for node in group if node in nodes] for group in before]
    groups = [group for group in groups if group]
    known = {node for group in groups for node in group}
    if len(groups) != count or sum(map(len, groups)) != len(known):
        return _dealt(nodes, count)
    most = -(-len(nodes) // count)
    for node in sorted(nodes.keys() - known):
        open_ = [group for group in groups if len(group) < most]
        chosen = min(open_, key=lambda group: (len(group) >= size, _shared(node, group, nodes), len(group), group))
        chosen.append(node)
    if any(not size <= len(group) < 2 * size for group in groups):
        return _dealt(nodes, count)
    return _in_order(groups)


def without_agent(policy: CheckpointPolicy) -> Problem | None:
    """Return the problem that a checkpoint policy uses parity in a job without agents; None if the policy uses no
    parity."""
    peer = policy.peer()
    if peer is None or peer.parity is None:
        return None
    problem = "parity works only if agents of hyperpod_ext start the ranks, but another launcher runs this job"
    return Problem(problem, "checkpoint.tiers.*.parity", hint="remove it, and set the number of `replicas` instead")


def _dealt(nodes: Mapping[int, str], count: int) -> tuple[Group, ...]:
    """Distribute the nodes over `count` groups in turn, one failure domain after another, starting with the largest."""
    sizes = Counter(nodes.values())
    by_domain = sorted(nodes, key=lambda node: (-sizes[nodes[node]], nodes[node], node))
    return _in_order([by_domain[first::count] for first in range(count)])


def _shared(node: int, group: Sequence[int], nodes: Mapping[int, str]) -> int:
    return sum(nodes[other] == nodes[node] for other in group)


def _in_order(groups: Sequence[Sequence[int]]) -> tuple[Group, ...]:
    return tuple(sorted(tuple(sorted(group)) for group in groups))
