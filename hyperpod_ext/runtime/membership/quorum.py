"""Decides which part of a job may continue after a network partition. Pure functions.

An existing coordinator may continue if it reaches at least half of the members. A new coordinator needs the votes of
more than half of the members, so that at most one part of a split network can train.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any


def may_go_on(members: Set[int], reached: Set[int], coordinator: int) -> bool:
    """Return whether the existing coordinator on node `coordinator` may continue. `reached`: nodes that this
    coordinator can reach."""
    return 2 * len(members & (reached | {coordinator})) >= len(members)


def may_take_over(members: Set[int], votes: Set[int]) -> bool:
    """Return whether the nodes in `votes` are a majority of `members`. All nodes in `votes` have voted for one node,
    which is also in `votes`."""
    return 2 * len(members & votes) > len(members)


def candidates(members: Collection[int], lost: int) -> list[int]:
    """Return the nodes that may replace the coordinator on the lost node `lost`, in the order in which agents contact
    them."""
    return sorted(set(members) - {lost})


def newest(job_states: Collection[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the newest of several copies of the job state: the copy with the highest number in the latest term."""
    return max(job_states, key=lambda job_state: (int(job_state["term"]), int(job_state["number"])))
