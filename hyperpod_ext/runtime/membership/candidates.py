"""Chooses the candidates: agents that keep a copy of the job state, so that one of them can replace a lost coordinator.
Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

CANDIDATES = 16
"""Number of candidates in addition to the coordinator. In a job with fewer agents, every agent is a candidate."""


def choose_candidates(before: Set[int], there: Mapping[int, str], coordinator: int, most: int = CANDIDATES) -> set[int]:
    """Choose the nodes whose agents get a copy of the job state. Node `coordinator` is always chosen.

    Nodes in `before` (the earlier candidates) that are still connected stay candidates. New candidates are chosen from
    the failure domains (racks or availability zones) that have the fewest candidates.

    Args:
        there: failure domain of each node whose agent is connected.
    """
    chosen = {node for node in before if node in there and node != coordinator}
    load = Counter(there[node] for node in chosen)
    by_domain: dict[str, list[int]] = {}
    for node in sorted(there.keys() - chosen - {coordinator}, reverse=True):
        by_domain.setdefault(there[node], []).append(node)
    while len(chosen) < most and by_domain:
        domain = min(by_domain, key=lambda domain: (load[domain], by_domain[domain][-1]))
        chosen.add(by_domain[domain].pop())
        load[domain] += 1
        if not by_domain[domain]:
            del by_domain[domain]
    return chosen | ({coordinator} & there.keys())
