"""Mode `run`: a script without a line of ours is started again on every rank after a fault, and resumes by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import kill_node

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "own_saves.py"
Start = Callable[..., Any]


@pytest.fixture
def start(job: Any, tmp_path: Path) -> Start:
    """A function that starts the script in a folder of its own."""

    def begin(name: str = "job", env: dict[str, str] | None = None, **of: Any) -> Any:
        folder = tmp_path / f"{name}-saves"
        folder.mkdir()
        variables = {"HPX_TEST_FOLDER": str(folder)} | (env or {})
        # of two ranks, whose sums have one order: with more, DDP's first step after any restart adds in another
        of = {"script": SCRIPT, "settings": {"mode": "run"}, "workers_per_node": 1, **of}
        running = job(name, env=variables, **of)
        running.saves = folder
        return running.start()

    return begin


def digests(running: Any) -> set[str]:
    return {path.read_text() for path in running.saves.glob("digest-*")}


def pids(running: Any, generation: int) -> dict[int, int]:
    started = [event for event in running.events() if event["event"] == "joined"]
    each = len(started) // 2
    return {event["rank"]: event["pid"] for event in started[(generation - 1) * each :][:each]}


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_killed_rank_costs_the_steps_since_the_last_save(start: Start, rank: int) -> None:
    undisturbed, running = start("undisturbed"), start(env={"HPX_TEST_HOLD": f"{rank}@13"})
    pid = running.until("worker_started", rank=rank)["pid"]
    for each in (0, 1):  # a step that one rank has not reported does not count as lost
        running.until("step", rank=each, step=12)
    os.kill(pid, signal.SIGKILL)
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert undisturbed.wait()["state"] == "succeeded"
    assert len(digests(running)) == 1
    assert digests(running) == digests(undisturbed)
    (recovery,) = report["recoveries"]
    assert (recovery["fault"]["rank"], recovery["resumed_step"], recovery["steps_lost"]) == (rank, 10, 2)
    assert recovery["source"] == "script"
    assert recovery["phases"]["first_new_step"] is not None
    before, after = pids(running, 1), pids(running, 2)
    assert before.keys() == after.keys() == {0, 1}
    assert not set(before.values()) & set(after.values()), "each rank is a new process"


@pytest.mark.parametrize("saves", [pytest.param("folder", marks=pytest.mark.thorough), "async-folder", "stream"])
def test_saves_of_other_kinds_count(start: Start, saves: str) -> None:
    env = {"HPX_TEST_SAVES": saves}
    undisturbed, running = start("undisturbed", env=env), start(env=env | {"HPX_TEST_HOLD": "1@13"})
    pid = running.until("worker_started", rank=1)["pid"]
    for each in (0, 1):
        running.until("step", rank=each, step=12)
    os.kill(pid, signal.SIGKILL)
    report = running.wait()
    assert [(one["resumed_step"], one["steps_lost"]) for one in report["recoveries"]] == [(10, 2)]
    assert [one["loaded"] for one in running.events() if one["event"] == "begun" and one["step"]] == [10, 10]
    assert "has loaded nothing" not in (running.folder / "logs" / "rank0.log").read_text()
    undisturbed.wait()
    assert digests(running) == digests(undisturbed)


def test_a_script_that_raises_once_is_started_again(start: Start) -> None:
    running = start(env={"HPX_TEST_RAISES": "1@13"})
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    (recovery,) = report["recoveries"]
    assert recovery["fault"]["cause"].startswith("ValueError: no luck in step 13 (own_saves.py:")
    assert recovery["resumed_step"] == 10


def test_a_script_that_raises_each_time_ends_the_job_with_its_own_words(start: Start) -> None:
    report = start(env={"HPX_TEST_RAISES": "1@13", "HPX_TEST_ALWAYS": "1"}).wait()
    assert report["state"] == "failed"
    assert "ValueError: no luck in step 13" in report["error"]["message"]


def test_a_spare_takes_the_ranks_of_a_lost_node(start: Start) -> None:
    """Also those of node 0, which coordinates: three agents can elect another."""
    undisturbed, running = start("undisturbed"), start(spares=1, env={"HPX_TEST_HOLD": "0@13"})
    running.until("step", rank=0, step=12)
    kill_node(running, 0)
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    undisturbed.wait()
    assert digests(running) == digests(undisturbed)
    assert [one["resumed_step"] for one in report["recoveries"]] == [10]


def test_a_script_that_loads_nothing_is_warned_and_begins_again(start: Start) -> None:
    running = start(env={"HPX_TEST_SAVES": "ignored", "HPX_TEST_HOLD": "1@13"})
    pid = running.until("worker_started", rank=1)["pid"]
    running.until("step", rank=1, step=12)
    os.kill(pid, signal.SIGKILL)
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    warning = (running.folder / "logs" / "rank0.log").read_text()
    assert "the script has saved step 10" in warning
    assert "has loaded nothing" in warning
    assert [event["step"] for event in running.events() if event["event"] == "begun" and event["rank"] == 0] == [0, 0]


def test_a_save_that_is_cut_off_leaves_the_file_before(tmp_path: Path, start: Start) -> None:
    """A rank that is killed while it saves: the newest whole file is loaded."""
    running = start(env={"HPX_TEST_CUT": "15"})
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert [one["resumed_step"] for one in report["recoveries"]] == [10]


def test_a_long_evaluation_is_no_hang(start: Start) -> None:
    hang = {"floor_s": 0.2, "factor": 1.5}
    settings = {"mode": "run", "restart": {"hang": hang}}
    report = start(settings=settings, env={"HPX_TEST_EVALUATES": "0@13"}).wait()
    assert (report["state"], report["recoveries"]) == ("succeeded", [])


@pytest.mark.parametrize("saved", [0, 1])
@pytest.mark.parametrize("step", [pytest.param(5, marks=pytest.mark.thorough), 10])
def test_a_step_that_one_rank_has_not_saved_is_set_aside(start: Start, saved: int, step: int) -> None:
    """One rank has replaced its file, and the other one dies before it does."""
    env = {"HPX_TEST_SAVES": "each"}
    undisturbed, running = start("undisturbed", env=env), start(env=env | {"HPX_TEST_CUT": f"{1 - saved}@{step}"})
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert [(one["resumed_step"], one["steps_lost"]) for one in report["recoveries"]] == [(step - 5, 5)]
    (aside,) = [event for event in running.events() if event["event"] == "saves_set_aside"]
    path = str(running.saves / f"newest-{saved}.pt")
    assert (aside["rank"], aside["step"], aside["paths"]) == (saved, step - 5, [path])
    assert any(f"rank {saved} has set {path} aside" in warning for warning in report["warnings"])
    undisturbed.wait()
    assert digests(running) == digests(undisturbed)
    (kept,) = (running.folder / "set-aside").rglob("*.pt")
    assert torch.load(kept, weights_only=True)["step"] == step
    left = {each.name for each in running.saves.iterdir()}
    assert left == {"newest-0.pt", "newest-1.pt", "digest-0", "digest-1", "cut"}, "former files are removed"
    assert list((running.folder / "script-saves").glob("former/*")) == []


def test_a_folder_that_is_overwritten_has_files_of_one_step(start: Start) -> None:
    """Rank 0 has written its file of step 15, and rank 1 dies before it does."""
    env = {"HPX_TEST_SAVES": "one-folder"}
    undisturbed, running = start("undisturbed", env=env), start(env=env | {"HPX_TEST_CUT": "1@15"})
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert [one["resumed_step"] for one in report["recoveries"]] == [10]
    undisturbed.wait()
    assert digests(running) == digests(undisturbed)
    assert {each.name for each in running.saves.iterdir()} == {"newest", "digest-0", "digest-1", "cut"}


def test_pickled_code_is_refused_unless_the_script_allows_it(start: Start) -> None:
    """As by torch itself."""
    env = {"HPX_TEST_SAVES": "pickled", "HPX_TEST_RAISES": "1@13"}
    refused, allowed = start("refused", env=env), start(env=env | {"HPX_TEST_UNPICKLES": "1"})
    report = refused.wait()
    assert report["state"] == "failed"
    assert "UnpicklingError: Weights only load failed" in report["error"]["message"]
    report = allowed.wait()
    assert report["state"] == "succeeded", report["error"]
    assert [one["resumed_step"] for one in report["recoveries"]] == [10]


def test_a_save_to_a_place_that_cannot_be_written_ends_the_job(start: Start) -> None:
    running = start(env={"HPX_TEST_SAVES": "nowhere"})
    report = running.wait()
    assert report["state"] == "failed"
    assert f"Parent directory {running.saves}/missing does not exist." in report["error"]["message"]
    assert len(report["faults"]) == 2, "the second time shows that it happens each time"


def test_ranks_that_load_different_steps_end_the_job(start: Start) -> None:
    """Rank 0 has overwritten its file with step 10, and rank 1 dies before it does."""
    report = start(env={"HPX_TEST_SAVES": "each-stream", "HPX_TEST_CUT": "1@10"}).wait()
    assert report["state"] == "failed"
    found = report["error"]["message"]
    assert "has loaded its checkpoint of step" in found
    assert "of step 5" in found
    assert "of step 10" in found
