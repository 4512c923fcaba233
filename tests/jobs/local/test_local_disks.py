"""Local jobs whose disk is full or broken: training goes on, and the last words name the folder and the error."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import Begun, begin_hp_ext, call_hp_ext
from event_log import events_in
from local_place import LocalPlace
from small_disk import fill, make_read_only, mounted
from waiting import until

SCRIPT = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from hyperpod_ext.runtime import Run, resilient

@resilient
def train(run: Run) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for step in run.steps(12):
        while step == 5 and not Path("go").exists():
            time.sleep(0.01)
        if step == 6 and run.rank == 1 and os.environ.get("FAILS"):
            raise ValueError("no such luck")
        model(torch.ones(1, 4)).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, "x" * 4096)

train()
"""


@pytest.fixture(autouse=True)
def disks(place: LocalPlace) -> Iterator[None]:
    with mounted(place.home, "1m"), mounted(place.scratch, "1m"):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of the script; a file `go` lets the job go on after its fourth step."""
    made = tmp_path / "script"
    made.mkdir()
    (made / "train.py").write_text(SCRIPT)
    job = {"name": "a", "script": "train.py", "nodes": 1, "workers_per_node": 2}
    job |= {"checkpoint": {"tiers": [{"kind": "memory"}]}, "restart": {"health": {"disk_mib": 0}}}
    (made / "job.yaml").write_text(json.dumps(job))
    return made


def begin(folder: Path, *options: str) -> Begun:
    return begin_hp_ext("create-job", "-f", folder / "job.yaml", "--wait", "-o", "json", *options)


def pids(run_dir: Path) -> dict[int, int]:
    """Of each rank that stands before its fifth step."""
    events = events_in(run_dir / "events.jsonl") if (run_dir / "events.jsonl").exists() else []
    made = {event["rank"] for event in events if event["event"] == "step" and event["step"] == 4}
    started = {event["rank"]: event["pid"] for event in events if event["event"] == "worker_started"}
    return {rank: pid for rank, pid in started.items() if rank in made}


def strike(place: LocalPlace, folder: Path, break_disk: Callable[[LocalPlace], object]) -> Path:
    """Break the disk while all ranks wait, kill one of them, and let the others go on; returns the run folder."""
    run_dir = place.home / "local" / "a" / "0001" / "main"
    until(lambda: len(pids(run_dir)) == 2, "the ranks have not come to their fifth step")
    victim = pids(run_dir)[1]
    break_disk(place)
    os.kill(victim, signal.SIGKILL)
    (folder / "go").touch()
    return run_dir


BROKEN = {
    "a full home": lambda place: fill(place.home),
    "a home that is read-only": lambda place: make_read_only(place.home),
    "a full temporary directory": lambda place: fill(place.scratch),
    "both full": lambda place: [fill(place.home), fill(place.scratch)],
}
ERRORS = {"a home that is read-only": "Read-only file system"}


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
def test_a_job_trains_on_and_recovers(place: LocalPlace, folder: Path, how: str) -> None:
    running = begin(folder)
    run_dir = strike(place, folder, BROKEN[how])
    done = running.wait()
    assert (done.code, done.json["state"]) == (0, "succeeded"), done.stderr
    logs = [path.read_text() for path in (*run_dir.glob("logs/*.log"), run_dir.parent / "engine.log")]
    assert "Traceback" not in done.stderr + "".join(logs)
    if "read-only" in how:
        assert f"{run_dir}/logs/rank1.log cannot be opened, its output is lost: Read-only" in "".join(logs)
    if how != "a full temporary directory":
        error = ERRORS.get(how, "No space left on device")
        assert any(str(run_dir) in each and error in each for each in done.json["warnings"]), done.json["warnings"]
        assert f"{error}" in done.stderr.splitlines()[-1]
    else:
        assert (done.json["steps"], done.json["warnings"]) == (12, [])
    assert call_hp_ext("status", "a", "-o", "json").json["state"] == "succeeded"
    place.scratch.joinpath("others").unlink(missing_ok=True)
    if "read-only" in how:  # what tells where the scratch folder is cannot be written: it stays
        assert place.lasting() == []
    else:
        assert place.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a full home", "a home that is read-only"])
def test_a_job_that_fails_names_its_own_cause_and_not_the_disk(place: LocalPlace, folder: Path, how: str) -> None:
    running = begin(folder, "--set", 'env.FAILS="1"')
    strike(place, folder, BROKEN[how])
    done = running.wait()
    assert (done.code, done.json["state"]) == (7, "failed"), done.stderr
    assert "ValueError: no such luck" in done.json["error"]["message"]
    assert "Traceback" not in done.stderr


def test_a_job_is_not_submitted_where_nothing_can_be_written(place: LocalPlace, folder: Path) -> None:
    fill(place.home, but=8192)
    done = call_hp_ext("create-job", "-f", folder / "job.yaml")
    assert (done.code, "Traceback" in done.stderr) == (1, False)
    assert str(place.home) in done.stderr
    assert "No space left on device" in done.stderr
    with contextlib.suppress(FileNotFoundError):
        (place.home / "others").unlink()
    make_read_only(place.home)
    done = call_hp_ext("create-job", "-f", folder / "job.yaml")
    assert (done.code, "Traceback" in done.stderr) == (1, False)
    assert f"{place.home}/local/a" in done.stderr
    assert "Read-only file system" in done.stderr
