"""The quorum: the side that may continue when nodes cannot reach each other. Pure.

An existing coordinator may continue with half of the members of the last agreed membership; a new one needs more than
half of them. So of two sides that cannot reach each other, at most one trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any


def may_go_on(members: Set[int], reached: Set[int], coordinator: int) -> bool:
    """Return whether `coordinator`, which reaches itself and `reached`, may still coordinate `members`."""
    return 2 * len(members & (reached | {coordinator})) >= len(members)


def may_take_over(members: Set[int], votes: Set[int]) -> bool:
    """Return whether `votes`, all for one node and its own among them, are a majority of `members`."""
    return 2 * len(members & votes) > len(members)


def candidates(members: Collection[int], lost: int) -> list[int]:
    """Return the nodes that may take the place of coordinator `lost`, in the order in which they are tried."""
    return sorted(set(members) - {lost})


def newest(job_states: Collection[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the newest job state: the last one of the latest term."""
    return max(job_states, key=lambda job_state: (int(job_state["term"]), int(job_state["number"])))
