"""Who may go on when nodes cannot reach each other. Pure.

A coordinator may go on with half of the members that were agreed on last; who takes its place needs more than
half of them. So of two sides that cannot see each other, one at most trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any


def may_go_on(members: Set[int], reached: Set[int], coordinator: int) -> bool:
    """Whether `coordinator`, who reaches `reached` and itself, still speaks for `members`."""
    return 2 * len(members & (reached | {coordinator})) >= len(members)


def may_take_over(members: Set[int], votes: Set[int]) -> bool:
    """Whether those who voted for one node, itself among them, are a majority of `members`."""
    return 2 * len(members & votes) > len(members)


def candidates(members: Collection[int], lost: int) -> list[int]:
    """Who is asked to take the place of coordinator `lost`, in this order."""
    return sorted(set(members) - {lost})


def newest(job_states: Collection[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The job state to go on with: of the latest term, the last one."""
    return max(job_states, key=lambda job_state: (int(job_state["term"]), int(job_state["number"])))
