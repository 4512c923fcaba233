"""Scripts that register their local variables in `run.steps`, through a kill of rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TINY = Path(__file__).parent / "tiny.py"
RESTORED = (
    "    run.restore(model=model, optimizer=optimizer, schedule=schedule)\n    parallel = run.data_parallel(model)\n"
)
KILL = {"what": "before backward", "rank": 0, "step": 5}
LIVE = {"checkpoint": {"tiers": [{"kind": "memory", "every_steps": 1000}]}}
"""No snapshot after the first: a new rank gets the state of a live one."""


HELD = {"HPX_TEST_NORM": "LayerNorm", "HPX_TEST_HOLD": "[[1, 0, 5]]"}


def let_go(running: Any) -> None:
    """Let rank 0 be killed once the others have made the step before: one that is cut in it has no live state."""
    for rank in range(1, 4):
        running.until("step", rank=rank, step=4)
    (running.folder / "let-go").touch()


def tiny(tmp_path: Path, before: str, steps: str) -> Path:
    """The tiny script with other lines before its loop, and `steps` in the place of `run.steps(STEPS)`."""
    text = TINY.read_text()
    assert text.count(RESTORED) == text.count("run.steps(STEPS)") == 1
    script = tmp_path / "moved.py"
    script.write_text(text.replace(RESTORED, before).replace("run.steps(STEPS)", steps))
    return script


MOVED = (
    "    scaler = torch.amp.GradScaler('cpu', enabled=False)\n"
    "    parallel = run.data_parallel(model)\n"
    "    raw_model = parallel.module\n"
)
"""DDP comes before the registration, and would broadcast the new rank 0's values; a scaler has no state."""


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, job_class: Any, alike: dict[str, Any]) -> dict[str, Any]:
    """Report of that script with nothing going wrong: its losses are those of the script with `run.restore`."""
    folder = tmp_path_factory.mktemp("undisturbed")
    script = tiny(folder, MOVED, "run.steps(STEPS, **locals())")
    report: dict[str, Any] = job_class(folder / "job", script=script, env={"HPX_TEST_NORM": "LayerNorm"}).start().wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == alike["losses"]
    return report


@pytest.mark.parametrize(("settings", "source"), [({}, "memory"), (LIVE, "live")], ids=["memory", "live"])
def test_local_variables_are_registered_by_the_loop(
    job: Any, moved: dict[str, Any], tmp_path: Path, settings: dict[str, Any], source: str
) -> None:
    script = tiny(tmp_path, MOVED, "run.steps(STEPS, **locals())")
    running = job(script=script, fault=KILL, settings=settings, env=HELD).start()
    let_go(running)
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == moved["losses"]
    assert report["weights"] == moved["weights"] != ""
    assert report["steps_lost"] == 0
    (recovery,) = report["recoveries"]
    assert (recovery["fault"]["rank"], recovery["source"]) == (0, source)
    kept = running.until("kept", rank=0)
    assert kept["objects"].keys() == {"model", "optimizer", "schedule", "scaler"}


def test_a_broadcast_before_the_restore_costs_the_live_state_and_no_bit(
    job: Any, alike: dict[str, Any], tmp_path: Path
) -> None:
    """Torch's own DDP sends the values of the new rank 0 into parameters that survivors have kept."""
    before = (
        "    parallel = torch.nn.parallel.DistributedDataParallel(model)\n"
        "    run.restore(model=model, optimizer=optimizer, schedule=schedule)\n"
    )
    running = job(script=tiny(tmp_path, before, "run.steps(STEPS)"), fault=KILL, env=HELD).start()
    let_go(running)
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == alike["losses"]
    assert report["steps_lost"] == 0
    (recovery,) = report["recoveries"]
    assert recovery["source"] == "memory"
    refused = [event["error"] for event in running.events() if event["event"] == "restore_failed"]
    assert refused
    assert all("do not have this rank's state, g1-s4" in error for error in refused)
    assert all("run.data_parallel does not" in error for error in refused)


def test_arguments_that_each_call_divides_are_the_same_in_each_call(
    job: Any, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Survivors had batches of 2 samples, and the new process of 8."""
    text = TINY.read_text().replace("\n@resilient\n", "\nargs = argparse.Namespace(batch_size=32)\n\n@resilient\n")
    text = text.replace("    def build()", "    args.batch_size = args.batch_size // run.world_size\n\n    def build()")
    text = text.replace("torch.randn(8, 16)", "torch.randn(args.batch_size, 16)")
    script = tmp_path / "divides.py"
    script.write_text(text.replace("import json\n", "import argparse\nimport json\n"))
    running = job(script=script, fault={"what": "before backward", "rank": 1, "step": 5}).start()
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == undisturbed["losses"]
    assert "args.batch_size is 32 again, as before the first call of the training function" in running.logs()


def test_an_object_that_only_some_ranks_register_is_named_before_training(job: Any, tmp_path: Path) -> None:
    """Its rank could not get its state from another one."""
    before = "    if run.rank % 2:\n        average = torch.nn.Linear(1, 1)\n    parallel = run.data_parallel(model)\n"
    report = job(script=tiny(tmp_path, before, "run.steps(STEPS, **locals())")).start().wait()
    assert report["state"] == "failed"
    assert "average is registered on ranks 1, 3, and not on ranks 0, 2" in report["error"]["message"]
    assert not report["losses"]
