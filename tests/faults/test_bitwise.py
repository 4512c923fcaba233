"""Faults in every place of a step, under DDP, FSDP2 and HSDP: each loss and the final weights are bit for bit those of
the undisturbed run."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SCRIPT = Path(__file__).parent / "bitwise.py"
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "torch.utils.data"]
PLACES = ("data loading", "forward", "backward", "all-reduce", "optimizer", "checkpointing")
HOWS = ("kill", "raise")
STEPS = 26
BUDGETS = dict.fromkeys(("max_restarts", "max_in_process", "max_on_node"), 50)


def described(parallel: str, *faults: dict[str, Any], every_steps: int = 1, **env: str) -> dict[str, Any]:
    """A job of the script, with faults."""
    policy = {"tiers": [{"kind": "memory", "every_steps": every_steps}]}
    return {
        "script": SCRIPT,
        "settings": {"restart": {"preload": PRELOAD, **BUDGETS}, "checkpoint": policy},
        "env": {
            "HPX_TEST_PARALLEL": parallel,
            "HPX_TEST_STEPS": str(STEPS),
            "HPX_TEST_FAULTS": json.dumps(faults),
            **env,
        },
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, job_class: Any) -> Any:
    """A function that gives the report of a run with nothing going wrong."""

    @functools.cache
    def run(parallel: str) -> dict[str, Any]:
        report = job_class(tmp_path_factory.mktemp(parallel) / "job", **described(parallel)).start().wait()
        assert report["state"] == "succeeded", report["error"]
        assert len(set(report["losses"].values())) == STEPS
        return report

    return run


@pytest.fixture
def equal(job: Any, undisturbed: Any) -> Any:
    """A function that runs the script with faults, and compares; it returns the recoveries."""

    def run(parallel: str, *faults: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
        expected = undisturbed(parallel)
        report = job(parallel, **described(parallel, *faults, **options)).start().wait()
        assert report["state"] == "succeeded", report["error"]
        differing = [step for step, loss in expected["losses"].items() if report["losses"].get(step) != loss]
        assert not differing, f"losses differ from step {differing[0]} on"
        assert report["weights"] == expected["weights"] != ""
        assert report["steps_lost"] == 0
        return report["recoveries"]  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "hsdp"])
def test_faults_in_every_place_of_a_step_change_no_bit(equal, parallel):
    """A kill and an exception in each place, on one rank after the other; survivors keep their processes."""
    numbered = list(enumerate([(how, place) for how in HOWS for place in PLACES]))
    faults = [{"place": p, "how": how, "ranks": [(n + n // 6) % 4], "step": 2 * n + 2} for n, (how, p) in numbered]
    recoveries = equal(parallel, *faults)
    assert [recovery["fault"]["rank"] for recovery in recoveries] == [fault["ranks"][0] for fault in faults]
    assert all(recovery["survivor_pids_kept"] for recovery in recoveries)
    if parallel == "ddp":  # whoever fails in the optimizer lags a step behind the others, and is led forward
        for number in (4, 10):
            assert recoveries[number]["resumed_step"] == faults[number]["step"]


def kill_together(place: str, *ranks: int, step: int) -> dict[str, Any]:
    """Ranks are killed once all others have made the step before."""
    return {"place": place, "how": "kill", "ranks": list(ranks), "step": step, "together": True}


@pytest.mark.parametrize("parallel", ["ddp", "hsdp"])
def test_without_any_snapshot_the_state_comes_from_live_ranks(equal, parallel):
    faults = [kill_together(place, n, step=3 * n + 3) for n, place in enumerate(PLACES[:4])]
    node = kill_together("backward", 0, 1, step=18)  # of each HSDP shard one copy is left
    recoveries = equal(parallel, *faults, node, every_steps=1000)
    assert {recovery["source"] for recovery in recoveries} == {"live"}


def test_a_process_that_comes_anew_compiles_its_modules_again(equal):
    kill, exception = ({"place": "backward", "how": how, "ranks": [1], "step": 5 * n} for n, how in enumerate(HOWS, 1))
    recoveries = equal("fsdp2 compiled", kill, exception)
    assert [recovery["survivor_pids_kept"] for recovery in recoveries] == [True, True]


def test_objects_that_are_built_anew_after_a_fault_take_over_what_they_replace(equal):
    faults = [kill_together(place, n, step=3 * n + 3) for n, place in enumerate(PLACES[:4])]
    recoveries = equal("hsdp", *faults, HPX_TEST_REBUILD="1", every_steps=1000)
    assert {recovery["source"] for recovery in recoveries} == {"live"}


def test_both_copies_of_a_shard_lost_at_once_come_from_memory(equal):
    both = {"place": "forward", "how": "kill", "ranks": [0, 2], "step": 5}
    everybody = {"place": "backward", "how": "kill", "ranks": [0, 1, 2, 3], "step": 9}
    equal("hsdp", both, everybody)


@pytest.mark.parametrize(("place", "how"), [("all-reduce", "kill"), ("optimizer", "kill"), ("checkpointing", "raise")])
def test_a_fault_in_a_last_step_that_ends_because_the_loader_does_changes_no_bit(equal, place, how):
    """Such a step is committed although the loop never asks for the next one."""
    fault = {"place": place, "how": how, "ranks": [1], "step": STEPS}
    assert len(equal("ddp", fault, HPX_TEST_ZIPPED="1")) == 1
