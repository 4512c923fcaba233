"""Faults in every place of a step, under DDP, FSDP2 and HSDP: each loss and the final weights are bit for bit those of
the undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "bitwise.py"
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "torch.utils.data"]
PLACES = ("data loading", "forward", "backward", "all-reduce", "optimizer", "checkpointing")
STEPS = 14


@pytest.fixture
def bitwise(job: Any) -> Any:
    """A function that runs the script to its end, with faults."""

    def run(name: str, parallel: str, *faults: dict[str, Any], **env: str) -> dict[str, Any]:
        import json

        settings = {"restart": {"preload": PRELOAD, "max_restarts": 50}}
        env = {"HPX_TEST_PARALLEL": parallel, "HPX_TEST_FAULTS": json.dumps(faults), **env}
        return job(name, script=SCRIPT, settings=settings, env=env).start().wait()  # type: ignore[no-any-return]

    return run


def everywhere(how: str) -> list[dict[str, Any]]:
    """A fault in each place, every other step, on one rank after the other."""
    return [
        {"place": place, "how": how, "ranks": [number % 4], "step": 2 * number + 2}
        for number, place in enumerate(PLACES)
    ]


def assert_equal(undisturbed: dict[str, Any], report: dict[str, Any]) -> None:
    assert undisturbed["state"] == "succeeded", undisturbed["error"]
    assert report["state"] == "succeeded", report["error"]
    differing = [step for step, loss in undisturbed["losses"].items() if report["losses"].get(step) != loss]
    assert not differing, f"losses differ from step {differing[0]} on"
    assert report["weights"] == undisturbed["weights"] != ""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "hsdp"])
def test_faults_in_every_place_of_a_step_change_no_bit(bitwise, parallel):
    undisturbed = bitwise("undisturbed", parallel)
    assert len(set(undisturbed["losses"].values())) == STEPS
    for how in ("kill", "raise"):
        report = bitwise(how, parallel, *everywhere(how))
        assert_equal(undisturbed, report)
        assert len(report["recoveries"]) == len(PLACES)
        assert all(recovery["survivor_pids_kept"] for recovery in report["recoveries"])
        assert report["steps_lost"] == 0


@pytest.mark.parametrize("parallel", ["fsdp2", "hsdp"])
def test_objects_that_are_built_anew_after_a_fault_take_over_what_they_replace(bitwise, parallel):
    undisturbed = bitwise("undisturbed", parallel, HPX_TEST_REBUILD="1")
    report = bitwise("anew", parallel, *everywhere("kill"), HPX_TEST_REBUILD="1")
    assert_equal(undisturbed, report)
    assert report["steps_lost"] == 0


def test_two_shards_lost_at_once_come_back(bitwise):
    undisturbed = bitwise("undisturbed", "hsdp")
    both = {"place": "forward", "how": "kill", "ranks": [0, 3], "step": 5}
    node = {"place": "forward", "how": "kill", "ranks": [0, 1], "step": 9}
    report = bitwise("two", "hsdp", both, node)
    assert_equal(undisturbed, report)
