"""Faults on pods that another operator drives, one with habits of its own."""

from __future__ import annotations

from typing import Any

import other_operator
import pytest
from random_pods import ELASTIC_STEPS, Kill, pods

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(400)]

LAUNCHERS = ("ours", "hyperpodrun")
RULE = {"name": "steps", "logPattern": "step [0-9]+.*", "expectedRecurringFrequencyInSeconds": 2}
HANG = {"floor_s": 2.0, "factor": 2.0}
INJECT = "exception:rank=2,step=4;hang:rank=3,step=14,how=deadlock"
KILLS = [
    Kill("rank", 1, 9, 0.0, beside=False, comes_back=False),
    Kill("pod", 1, 18, 0.0, beside=False, comes_back=False),
    Kill("pod", 0, 24, 0.0, beside=False, comes_back=False),
    Kill("operator", 0, 30, 0.1, beside=False, comes_back=False),
    Kill("rank", 2, 30, 0.0, beside=True, comes_back=False),
]
CAUSES = ("an injected exception in forward of step 4", "SIGKILL", "hang", "lost", "lost", "SIGKILL")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_job_through_all_faults(launcher: str, wanted_on_pods: dict[str, Any]) -> None:
    rules = [RULE] if launcher == "hyperpodrun" else []
    with pods(launcher, program=other_operator.__file__, inject=INJECT, hang=HANG, log_rules=rules) as running:
        running.run(KILLS, spares=2)
        running.assert_equal(wanted_on_pods)
        running.assert_nothing_left()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_three_one(launcher: str) -> None:
    with pods(launcher, program=other_operator.__file__, sizes={10: 3, 20: 1}) as running:
        running.run([], spares=1)
        made = [event for event in running.events() if event["event"] == "step" and event["rank"] == 0]
        assert {event["step"] for event in made} == set(range(1, ELASTIC_STEPS + 1))
        running.assert_nothing_left()
