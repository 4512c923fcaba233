"""A device that works behind the loop, as a GPU does: which steps count after a fault, and that no garbage stays."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "async_train.py"
PLACES = ("forward", "backward", "accumulated", "optimizer", "rest")
BUDGETS = dict.fromkeys(("max_restarts", "max_in_process", "max_on_node"), 100)
KINDS = [("ddp", ""), ("ddp", "1"), ("fsdp2", ""), ("fsdp2", "1")]
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"]


def described(
    kind: tuple[str, str], faults: list[dict[str, Any]], *, ahead: int, steps: int, every_steps: int, mutant: str = ""
) -> dict[str, Any]:
    policy = {"tiers": [{"kind": "memory", "every_steps": every_steps}]}
    return {
        "script": SCRIPT,
        "settings": {"restart": {"preload": PRELOAD, **BUDGETS}, "checkpoint": policy},
        "env": {
            "HPX_TEST_PARALLEL": kind[0],
            "HPX_TEST_FUSED": kind[1],
            "HPX_TEST_AHEAD": str(ahead),
            "HPX_TEST_STEPS": str(steps),
            "HPX_TEST_FAULTS": json.dumps(faults),
            "HPX_TEST_MUTANT": mutant,
        },
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, job_class: Any) -> Any:
    """A function that gives the weights of a run with nothing going wrong, in which the loop waits for the device."""

    @functools.cache
    def run(kind: tuple[str, str], steps: int) -> str:
        options = described(kind, [], ahead=0, steps=steps, every_steps=1)
        report = job_class(tmp_path_factory.mktemp("undisturbed") / "job", **options).start().wait()
        assert report["state"] == "succeeded", report["error"]
        return str(report["weights"])

    return run


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "ahead", "every_steps"), [(KINDS[3], 2, 3)])
def test_a_fault_behind_a_loop_that_runs_ahead_leaves_no_garbage(job, undisturbed, kind, ahead, every_steps):
    faults = [
        {"place": place, "how": how, "rank": number + 1, "step": 3 + 2 * number}
        for number, (place, how) in enumerate([("backward", "raise"), ("accumulated", "kill"), ("optimizer", "kill")])
    ]
    report = job(**described(kind, faults, ahead=ahead, steps=8, every_steps=every_steps)).start().wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["weights"] == undisturbed(kind, 8) != ""
    assert len(report["recoveries"]) == len(faults)
    assert report["metrics"]["most_ahead"] >= ahead


def test_a_process_whose_communicators_cannot_be_aborted_is_replaced(job, undisturbed):
    faults = [{"place": "backward", "how": "kill", "rank": 0, "step": 5}]
    options = described(KINDS[0], faults, ahead=1, steps=7, every_steps=3, mutant="stuck abort")
    report = job(**options).start().wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["weights"] == undisturbed(KINDS[0], 7)
    killed, stuck = report["faults"]
    assert (killed["rank"], stuck["rank"]) == (0, 2)
    assert stuck["cause"].startswith("AbortStuckError: the abort of group all: not done after 0.2 s")


def random_faults(seed: int, steps: int, number: int) -> list[dict[str, Any]]:
    """So many, at most one a step, at random places and moments of a step."""
    chance = random.Random(seed)
    faults = []
    for step in sorted(chance.sample(range(1, steps + 1), number)):
        place = chance.choice((*PLACES, chance.uniform(0, 0.05)))
        how = "kill" if isinstance(place, float) else chance.choice(("kill", "raise"))
        faults.append({"place": place, "how": how, "rank": chance.randrange(4), "step": step})
    return faults


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "number"),
    [
        *((seed, 15) for seed in (0, 5, 11, 14)),
        *(pytest.param(seed, 25, marks=pytest.mark.soak) for seed in (1, 3, 6, 10, 12, 15)),
    ],
)
def test_many_random_faults_in_one_job_leave_no_garbage(job, undisturbed, seed, number):
    """DDP and FSDP2, two optimizers, the loop 0 to 3 steps ahead, a snapshot every 1 to 3 steps: each of them in the 60
    faults of `make test-thorough`, more of their pairs in the 150 of `make soak`."""
    kind, ahead, every_steps, steps = KINDS[seed % 4], seed // 4 % 4, 1 + seed % 3, 2 * number
    options = described(kind, random_faults(seed, steps, number), ahead=ahead, steps=steps, every_steps=every_steps)
    report = job(**options).start().wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["weights"] == undisturbed(kind, steps) != ""
    assert len(report["faults"]) >= 0.8 * number, "two that come together may be met as one"


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", ["no query", "query after abort"])
def test_a_wrong_rule_is_seen(job, undisturbed, mutant):
    """Steps that are counted though they are not done leave garbage in the weights, or end the job."""
    faults = [{"place": "backward", "how": "kill", "rank": n % 4, "step": 7 + 4 * n} for n in range(3)]
    options = described(KINDS[0], faults, ahead=2, steps=18, every_steps=4, mutant=mutant)
    report = job(**options).start().wait()
    assert report["state"] != "succeeded" or report["weights"] != undisturbed(KINDS[0], 18)
