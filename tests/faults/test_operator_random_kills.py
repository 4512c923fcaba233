"""Ranks, agents, pods and the operator are killed at random moments: no job is lost, no bit, and nothing is left.

One seed alone: `HPX_PODS_SEED=17 pytest -s -m '' tests/faults/test_operator_random_kills.py`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import whole_run
from random_pods import STEPS, plan, pods

ONE = os.environ.get("HPX_PODS_SEED")
OF_OURS = 44
"""Pods of later seeds run AWS's agent."""
QUICK, THOROUGH = (4, 5), (*range(6, 13), 44)


def seeds() -> list[Any]:
    """All of them; most are soak."""
    if ONE:
        return [int(ONE)]

    def mark(seed: int) -> list[pytest.MarkDecorator]:
        return [] if seed in QUICK else [pytest.mark.thorough if seed in THOROUGH else pytest.mark.soak]

    return [pytest.param(seed, marks=mark(seed)) for seed in range(50)]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def wanted(tmp_path_factory: pytest.TempPathFactory, job_class: Any) -> dict[str, Any]:
    """Report of the same job with nothing going wrong."""

    def run() -> dict[str, Any]:
        env = {"HPX_TEST_NORM": "LayerNorm", "HPX_TEST_STEPS": str(STEPS)}
        report: dict[str, Any] = job_class(tmp_path_factory.mktemp("wanted") / "job", env=env).start().wait()
        assert report["state"] == "succeeded", report["error"]
        return report

    return whole_run.once("wanted on pods", run)


@pytest.mark.parametrize("seed", seeds())
def test_no_job_is_lost_whatever_is_killed(seed: int, wanted: dict[str, Any]) -> None:
    with pods("hyperpodrun" if seed >= OF_OURS else "ours") as running:
        running.run(plan(seed), spares=seed % 2)
        running.assert_equal(wanted)
        running.assert_nothing_left()
