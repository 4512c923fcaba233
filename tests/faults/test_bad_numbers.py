"""NaN, replicas that drift apart, and training functions that swallow what they must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SCRIPT = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from hyperpod_ext.runtime import Run, resilient

WHAT, RANK, STEP = os.environ["WHAT"], 2, int(os.environ.get("STEP", 5))
skipped = set(map(int, os.environ.get("WITHOUT", "").split()))

@resilient
def train(run: Run) -> None:
    def build():
        # statistics of batches are a rank's own: with them nobody goes on from what another rank has made wrong
        norm = nn.LayerNorm(16) if WHAT == "swallows a handle" else nn.BatchNorm1d(16)
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = run.keep(build)
    run.restore(model=model, optimizer=optimizer)
    parallel = run.data_parallel(model)
    while run.step < 10:
        try:
            make_steps(run, model, optimizer, parallel)
        except Exception:
            if WHAT != "swallows all":
                raise


def make_steps(run, model, optimizer, parallel):
    for step in run.steps(10):
        x = torch.randn(8, 8)
        if WHAT.startswith("nan") and run.rank == RANK and (step == STEP or WHAT == "nan for ever" and step > STEP):
            x[0, 0] = float("nan")
        if step in skipped:
            continue
        try:
            loss = parallel(x).square().mean()
            if WHAT != "nan without loss":
                run.guard(loss)
            optimizer.zero_grad()
            loss.backward()
            if WHAT == "swallows a handle":
                add_what_was_swallowed(run, model[3].weight.grad, step)
            optimizer.step()
        except Exception:
            if WHAT != "swallows":
                raise
        if WHAT == "drifts" and run.rank == RANK and step >= STEP:
            with torch.no_grad():
                model[3].weight += torch.rand(1)
        mean = loss.detach() / run.world_size
        try:
            if WHAT != "swallows a handle":
                dist.all_reduce(mean)
        except Exception:
            if WHAT != "swallows":
                raise
        run.log(loss=mean)


def add_what_was_swallowed(run, gradient, step):
    # a sum is under way when rank 1 dies; others hear of that while they compute, and take what there is for the sum
    strikes = step == STEP + 1 and run.generation == 1
    begun = [Path(__file__).with_name(f"sum-of-{rank}") for rank in range(run.world_size) if rank != 1]
    if strikes and run.rank == 1:
        while not all(file.exists() for file in begun):  # one that has not would be gone on from: its step is whole
            pass
        os.kill(os.getpid(), 9)
    ones = torch.ones(1 << 16)
    handle = dist.all_reduce(ones, async_op=True)
    if strikes:
        Path(__file__).with_name(f"sum-of-{run.rank}").touch()
    while strikes and not run._link.over:
        pass
    try:
        handle.wait()
    except Exception:
        pass
    gradient += ones[0]


train()
"""


@pytest.fixture
def start(job: Any, tmp_path: Path) -> Any:
    """A function that runs the script, and returns the report."""
    script = tmp_path / "numbers.py"
    script.write_text(SCRIPT)

    def run(
        what: str, *, name: str = "job", env: dict[str, str] | None = None, saved_every: int = 1, **restart: Any
    ) -> Any:
        tiers = [{"kind": "memory", "every_steps": saved_every}]
        settings = {"restart": restart, "checkpoint": {"tiers": tiers}}
        started = job(name, script=script, env={"WHAT": what, **(env or {})}, settings=settings).start()
        return started.wait(), started

    return run


def test_a_loss_that_is_not_finite_ends_the_job_and_names_rank_and_step(start):
    report, _ = start("nan", nan={"action": "raise"})
    assert report["state"] == "failed"
    assert report["error"]["code"] == "NonFiniteError"
    assert "step 5: the loss of rank 2 and a gradient on rank 0" in report["error"]["message"]
    assert "0.weight" in report["error"]["message"]
    assert report["steps"] == 4  # the step was not committed


def test_gradients_are_enough_to_notice(start):
    report, _ = start("nan without loss", nan={"action": "raise"})
    assert report["error"]["code"] == "NonFiniteError"
    assert (
        "step 5: a gradient on rank 0 (first on this rank: model.0.weight) is not finite" in report["error"]["message"]
    )


def test_a_skipped_step_changes_nothing_at_all(start):
    """Parameters, the optimizer's state and batch norm's statistics end as if the step had never been."""
    report, _ = start("nan", nan={"action": "skip"})
    without, _ = start("none", name="without", env={"WITHOUT": "5"})
    assert report["state"] == without["state"] == "succeeded", report["error"]
    assert report["skipped"] == [5]
    assert report["weights"] == without["weights"]


def test_too_many_skipped_steps_end_the_job(start):
    report, _ = start("nan for ever", nan={"action": "skip", "max_skips": 3})
    assert report["error"]["code"] == "NonFiniteError"
    assert "after 3 skipped steps in a row" in report["error"]["message"]
    assert report["skipped"] == [5, 6, 7]


def test_a_rank_that_drifts_apart_is_named_with_its_tensor(start):
    report, _ = start("drifts", compare_replicas_every=3)
    assert report["state"] == "failed"
    assert report["error"]["code"] == "ReplicasDifferError"
    expected = "after step 6: rank 2 differs from ranks 0, 1, 3, first in model.3.weight"
    assert expected in report["error"]["message"]


def test_a_flipped_bit_in_the_weights_is_found(job):
    settings = {"restart": {"compare_replicas_every": 4}}
    env = {"HPX_CHAOS": "corrupt-weights:rank=3,step=6,phase=rest", "HPX_TEST_NORM": "LayerNorm"}
    report = job(env=env, settings=settings).start().wait()
    assert report["error"]["code"] == "ReplicasDifferError"
    assert "after step 8: rank 3 differs from ranks 0, 1, 2, first in model.0.weight" in report["error"]["message"]


def test_exceptions_that_are_swallowed_inside_steps_cost_nothing(start):
    """The fault of rank 1 is caught by the others, who go on; the step they make is given up."""
    undisturbed, _ = start("swallows", name="undisturbed")
    report, running = start("swallows", env={"HPX_CHAOS": "sigkill:rank=1,step=6,phase=backward"})
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == undisturbed["losses"]
    assert report["weights"] == undisturbed["weights"]
    assert "let AbortedError and errors of collectives pass" in running.logs()


def test_a_training_function_that_swallows_all_exceptions_around_its_loop_is_stopped_too(start):
    undisturbed, _ = start("none", name="undisturbed")
    report, running = start("swallows all", env={"HPX_CHAOS": "sigkill:rank=1,step=6,phase=backward"})
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == undisturbed["losses"]
    assert report["weights"] == undisturbed["weights"]
    assert len(report["faults"]) == 1  # none of the others was ended for it
    assert "let AbortedError and errors of collectives pass" in running.logs()


def test_a_swallowed_handle_of_a_sum_that_was_under_way_is_no_part_of_a_step(start):
    """It has no snapshot, whose digest would tell that ranks differ: what is live would be gone on from."""
    undisturbed, _ = start("swallows a handle", name="undisturbed", env={"STEP": "100"}, saved_every=4)
    report, running = start("swallows a handle", saved_every=4)
    assert report["state"] == "succeeded", report["error"]
    assert report["recoveries"][0]["resumed_step"] == 4, "the optimizer has changed what was live"
    assert report["losses"] == undisturbed["losses"]
    assert report["weights"] == undisturbed["weights"]
    assert "let AbortedError and errors of collectives pass" in running.logs()
