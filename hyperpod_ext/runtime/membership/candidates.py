"""Which agents have the job state, so that one of them can coordinate when the coordinator is lost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

CANDIDATES = 16
"""How many there are besides the coordinator: in small jobs, everybody."""


def choose_candidates(before: Set[int], there: Mapping[int, str], coordinator: int, most: int = CANDIDATES) -> set[int]:
    """Nodes whose agents have the job state, `coordinator` among them.

    Those of `before` that are there stay. Others are added from failure domains that have the fewest of them.

    Args:
        there: failure domain of each member whose agent is there.
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
