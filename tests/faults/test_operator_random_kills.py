"""Ranks, agents, pods and the operator are killed at random moments: no job is lost, no bit, and nothing is left.

One seed alone: `HPX_PODS_SEED=17 pytest -s -m '' tests/faults/test_operator_random_kills.py`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from random_pods import Kill, plan, pods

ONE = os.environ.get("HPX_PODS_SEED")
OF_OURS = 44
"""Pods of later seeds run AWS's agent."""
QUICK, THOROUGH = (5,), (4, *range(6, 12), 44)


def seeds() -> list[Any]:
    """All of them; most are soak."""
    if ONE:
        return [int(ONE)]

    def mark(seed: int) -> list[pytest.MarkDecorator]:
        return [] if seed in QUICK else [pytest.mark.thorough if seed in THOROUGH else pytest.mark.soak]

    return [pytest.param(seed, marks=mark(seed)) for seed in range(50)]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_first_pod_starts_again_in_its_place_and_the_other_keeps_its_processes(
    wanted_on_pods: dict[str, Any],
) -> None:
    """No majority is left of two nodes, and nobody is at another address: the pod that comes again says who is gone."""
    with pods("ours") as running:
        running.run([Kill("pod", 0, 8, 0.0, beside=False, comes_back=True)], spares=0)
        running.assert_equal(wanted_on_pods)
        assert [fault["mode"] for fault in running.decided["faults"]] == ["in_process_restart"]
        running.assert_nothing_left()


@pytest.mark.parametrize("seed", seeds())
def test_no_job_is_lost_whatever_is_killed(seed: int, wanted_on_pods: dict[str, Any]) -> None:
    with pods("hyperpodrun" if seed >= OF_OURS else "ours") as running:
        running.run(plan(seed), spares=seed % 2)
        running.assert_equal(wanted_on_pods)
        running.assert_nothing_left()
