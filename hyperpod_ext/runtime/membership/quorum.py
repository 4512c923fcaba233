"""The quorum: which side may continue when nodes cannot reach each other. Pure functions.

An existing coordinator may continue with half of the members in the last agreed membership. A new coordinator needs
more than half of them. So of two sides that cannot reach each other, at most one trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any


def may_go_on(members: Set[int], reached: Set[int], coordinator: int) -> bool:
    """Return whether `coordinator`, which can reach the nodes `reached`, may continue to coordinate `members`."""
    return 2 * len(members & (reached | {coordinator})) >= len(members)


def may_take_over(members: Set[int], votes: Set[int]) -> bool:
    """Return whether `votes` are a majority of `members`. All votes, including a node's own, are for the same node."""
    return 2 * len(members & votes) > len(members)


def candidates(members: Collection[int], lost: int) -> list[int]:
    """Return the nodes that may replace coordinator `lost`, in the order in which they are contacted."""
    return sorted(set(members) - {lost})


def newest(job_states: Collection[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the newest job state, which is the last one in the latest term."""
    return max(job_states, key=lambda job_state: (int(job_state["term"]), int(job_state["number"])))
