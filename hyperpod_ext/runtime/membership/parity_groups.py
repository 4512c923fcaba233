"""Parity groups: nodes that hold parity of each other's snapshots. Pure functions of node numbers, not addresses.

A group can rebuild the snapshots of one lost node, but not of two. So the members of a group are in as many different
failure domains as possible. If possible, the loss of a rack takes at most one member of each group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.errors import Problem

Group = tuple[int, ...]
"""Nodes of a group, in order."""


def place_groups(nodes: Mapping[int, str], size: int, before: Sequence[Group] = ()) -> tuple[Group, ...]:
    """Divide nodes into parity groups of at least `size` nodes. With fewer nodes there is no group.

    Groups are larger than `size` if the number of nodes is not a multiple of it. Remaining nodes of a group in `before`
    stay together, and new nodes replace the lost ones.

    Args:
        nodes: failure domain of each node: a rack or an availability zone.

    Raises:
        ValueError: `size` is too small for parity.
    """
    if size < 3:
        raise ValueError(f"groups of {size} nodes: with two, parity is a copy; 3 are the fewest")
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
    """Return the problem if a policy has parity and the job has no agents; None if the policy has no parity."""
    peer = policy.peer()
    if peer is None or peer.parity is None:
        return None
    problem = "only agents of this project place parity; another launcher runs this job"
    return Problem(
        problem, "checkpoint.tiers.*.parity", hint="remove it, and write how many `replicas` there are to be"
    )


def _dealt(nodes: Mapping[int, str], count: int) -> tuple[Group, ...]:
    """Deal the nodes to `count` groups in turn, domain by domain, starting with the largest domain."""
    sizes = Counter(nodes.values())
    by_domain = sorted(nodes, key=lambda node: (-sizes[nodes[node]], nodes[node], node))
    return _in_order([by_domain[first::count] for first in range(count)])


def _shared(node: int, group: Sequence[int], nodes: Mapping[int, str]) -> int:
    return sum(nodes[other] == nodes[node] for other in group)


def _in_order(groups: Sequence[Sequence[int]]) -> tuple[Group, ...]:
    return tuple(sorted(tuple(sorted(group)) for group in groups))
