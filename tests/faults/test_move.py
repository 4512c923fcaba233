"""The ranks of a node move to a spare between two steps: no fault is counted, no step lost, and no bit differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nodes import kill_node

pytestmark = [pytest.mark.slow]


def order(job: Any, node: int, name: str = "001") -> str:
    """As `hp-ext move` does."""
    folder: Path = job.folder / "resizes"
    folder.mkdir(exist_ok=True)
    partial = folder / f"{name}.partial"
    partial.write_text(json.dumps({"node": node}))
    partial.rename(folder / f"{name}.json")
    return name


def assert_equal(report: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    assert report["state"] == "succeeded", report["error"]
    assert (report["losses"], report["weights"]) == (undisturbed["losses"], undisturbed["weights"])
    assert (report["steps_lost"], report["recoveries"], report["faults"], report["nodes_lost"]) == (0, [], [], [])


def moved_while_a_rank_stands(running: Any, node: int, let_go: Callable[[], None], before: int = 5) -> None:
    """Order it while rank 3 stands in step `before`."""
    running.until("step", step=before - 1, rank=3)
    name = order(running, node, f"{before:03d}")
    running.until("resize_prepared", ranks=[2 * node, 2 * node + 1])
    let_go()
    resized = running.until("resized", order=name)
    assert (resized["cause"], resized["of"], resized["nodes"], resized["pids_kept"]) == ("move", 2, 2, True)
    assert resized["pause_s"] < resized["t"] - next(running.events())["t"], (
        "another coordinator knows when all had stopped"
    )
    assert running.agents[node].wait() == 0


@pytest.mark.parametrize("node", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_a_spare_gets_the_ranks_and_the_node_ends_while_the_others_train(job: Any, undisturbed: Any, node: int) -> None:
    """Node 0 coordinates the job. Each rank has state of its own, which goes with it."""
    running = job(spares=1, env={"HPX_TEST_HOLD": "[[1, 3, 5]]"}).start()
    running.until("node_joined", node=2)
    moved_while_a_rank_stands(running, node, (running.folder / "let-go").touch)
    assert (running.folder / f"node{node}.left").exists()
    report = running.wait()
    assert_equal(report, undisturbed)
    (resize,) = report["resizes"]
    assert (resize["cause"], resize["of"], resize["nodes"]) == ("move", 2, 2)
    steps = [event["step"] for event in running.events() if event["event"] == "step" and event["rank"] == 2 * node]
    assert sorted({*steps}) == list(range(1, 13))
    # the next coordinator begins a generation: a rank that is one step ahead of another makes that again
    assert len(steps) <= 12 + (node == 0), "each is made once"


@pytest.mark.parametrize("every_steps", [1, pytest.param(1000, marks=pytest.mark.thorough)])
def test_shards_that_no_other_rank_has_go_with_it(
    sharded: Any, undisturbed_sharded: Any, tmp_path: Path, every_steps: int
) -> None:
    """The node serves them until the new ranks have saved, which of every 1,000th step is the job's end."""
    gate, tiers = tmp_path / "gate", [{"kind": "memory", "every_steps": every_steps}]
    os.mkfifo(gate)
    running = sharded("moved", {"what": "at the gate in step", "rank": 3, "step": 5}, tiers=tiers, spares=1)
    running.env["HPX_TEST_GATE"] = str(gate)
    running.start()
    moved_while_a_rank_stands(running, 1, lambda: os.close(os.open(gate, os.O_WRONLY)))
    assert_equal(running.wait(), undisturbed_sharded)
    assert (running.folder / "node1.left").exists() == (every_steps == 1)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """That many processes compute meanwhile."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.thorough
def test_all_nodes_are_exchanged_under_load_while_the_job_writes_to_a_durable_tier(
    sharded: Any, undisturbed_sharded: Any, tmp_path: Path
) -> None:
    """Twice as many processes as cores compute beside it."""
    gate, kept = tmp_path / "gate", tmp_path / "kept"
    os.mkfifo(gate)
    stands = [{"what": "at the gate in step", "rank": 3, "step": step} for step in (5, 9)]
    tiers = [{"kind": "memory"}, {"kind": "file", "path": str(kept), "every_steps": 2}]
    running = sharded("moved", *stands, tiers=tiers, spares=2)
    running.env["HPX_TEST_GATE"] = str(gate)
    with busy(2 * (os.cpu_count() or 1)):
        running.start()
        for spare in (2, 3):
            running.until("node_joined", node=spare)
        for before, node in ((5, 1), (9, 0)):
            moved_while_a_rank_stands(running, node, lambda: os.close(os.open(gate, os.O_WRONLY)), before)
        report = running.wait()
    assert_equal(report, undisturbed_sharded)
    assert [one["cause"] for one in report["resizes"]] == ["move", "move"]
    # another coordinator is told the last ones again
    steps = {
        (event["rank"], event["step"], event["generation"]) for event in running.events() if event["event"] == "step"
    }
    assert sorted(made[:2] for made in steps) == [(rank, step) for rank in range(4) for step in range(1, 13)]
    assert list(kept.glob("*/step-*12-*/manifest.json")), "the last step is there"


@pytest.mark.thorough
def test_another_coordinator_has_them_move_when_the_first_is_killed_on_the_way(job: Any, alike: Any) -> None:
    """Its own ranks go to one spare, as after any loss, and those that were to move to the other."""
    running = job(spares=2, env={"HPX_TEST_NORM": "LayerNorm", "HPX_TEST_HOLD": "[[1, 0, 5], [2, 3, 8]]"}).start()
    for spare in (2, 3):
        running.until("node_joined", node=spare)
    running.until("step", step=4, rank=3)
    name = order(running, 1)
    prepared = (event for event in running.events() if event["event"] == "resize_prepared")
    next(prepared)
    kill_node(running, 0)
    next(prepared)
    (running.folder / "let-go").touch()
    assert running.until("resized", order=name)["cause"] == "move"
    report = running.wait()
    assert (report["state"], report["nodes_lost"], report["steps_lost"]) == ("succeeded", [0], 0), report["error"]
    assert (report["losses"], report["weights"]) == (alike["losses"], alike["weights"])
    assert (running.folder / "node1.left").exists()


def test_where_no_spare_is_the_ranks_stay_and_the_answer_says_what_would_help(job: Any, undisturbed: Any) -> None:
    running = job(spares=1, env={"HPX_TEST_HOLD": "[[1, 3, 5]]"}).start(later=[2])
    running.until("step", step=4, rank=3)
    name = order(running, 1)
    refused = running.until("resize_refused", order=name)
    assert "no spare" in refused["why"]
    (running.folder / "let-go").touch()
    assert_equal(running.wait(), undisturbed)
