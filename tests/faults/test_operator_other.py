"""Faults on pods that another operator drives, one with habits of its own."""

from __future__ import annotations

import itertools
import json
from typing import Any

import other_operator
import pytest
from random_pods import ELASTIC_STEPS, Kill, Pods, pods

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAUNCHERS = [
    pytest.param("ours", marks=pytest.mark.thorough),
    pytest.param("hyperpodrun", marks=pytest.mark.soak),  # whose processes import for a minute, all together
]
RULE = {"name": "steps", "logPattern": "step [0-9]+.*", "expectedRecurringFrequencyInSeconds": 2}
HANG = {"floor_s": 2.0, "factor": 2.0}
INJECT = "exception:rank=2,step=4;hang:rank=3,step=14,how=deadlock"
KILLS = [
    Kill("rank", 1, 6, 0.0, beside=False, comes_back=False),
    Kill("pod", 1, 18, 0.0, beside=False, comes_back=False),
    Kill("pod", 0, 24, 0.0, beside=False, comes_back=False),
    Kill("operator", 0, 28, 0.1, beside=False, comes_back=False),
    Kill("rank", 2, 28, 0.0, beside=True, comes_back=False),
]
LOST = "is lost: "
CAUSES = {
    "ours": ("an injected exception", "SIGKILL", "no progress", LOST, LOST, "SIGKILL"),
    "hyperpodrun": ("an injected exception", "SIGKILL", "steps", "unreachable", "unreachable", "SIGKILL"),
}
"""Of each fault, in what is told of it."""


def told(running: Pods) -> list[str]:
    """By our agents of each fault, or by pods to their operator."""
    if running.launcher == "ours":
        return [event["cause"] for event in running.events() if event["event"] == "fault"]
    return [str(fault["told"]) for fault in running.decided["faults"]]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_job_through_all_faults(launcher: str, wanted_on_pods: dict[str, Any]) -> None:
    rules = [RULE] if launcher == "hyperpodrun" else []
    with pods(launcher, program=other_operator.__file__, inject=INJECT, hang=HANG, log_rules=rules) as running:
        running.run(KILLS, spares=2)
        running.assert_equal(wanted_on_pods)
        left = iter(told(running))
        assert all(any(cause in one for one in left) for cause in CAUSES[launcher]), told(running)
        running.assert_nothing_left()


@pytest.fixture(scope="module")
def came_to() -> dict[str, dict[int, float]]:
    """Losses of each job, and of one that goes to a single node at once."""
    with pods("ours", sizes={1: 1}) as running:
        running.run([], spares=0)
        return {"one node": running.losses}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_three_one(launcher: str, came_to: dict[str, dict[int, float]]) -> None:
    with pods(launcher, program=other_operator.__file__, sizes={10: 3, 20: 1}) as running:
        running.run([], spares=1)
        steps = [event for event in running.events() if event["event"] == "step"]
        assert {event["step"] for event in steps} == set(range(1, ELASTIC_STEPS + 1))
        made = [event for event in running.events() if event["event"] == "step" and event["rank"] == 0]
        assert [world for world, _ in itertools.groupby(event["world"] for event in made)] == [2, 3, 1]
        assert len(made) == ELASTIC_STEPS, "no step was made twice"
        assert running.decided["faults"] == []
        running.assert_nothing_left()
        came_to[launcher] = running.losses
    assert len({json.dumps(losses) for losses in came_to.values()}) == 1, "whoever starts the ranks"
