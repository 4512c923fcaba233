"""`restart.policy: continue`: healthy ranks make the next steps without those that were lost, which come back between
two steps. Every loss and the weights are those of one rank that nobody disturbed, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from durable_place import Directory
from resizing import BITWISE, PRELOAD, Resizable, assert_bitwise, run_alone

pytestmark = [pytest.mark.slow]

STEPS = "40"


def settings(**restart: Any) -> dict[str, Any]:
    return {"global_batch_size": 24, "restart": {"policy": "continue", "preload": PRELOAD, **restart}}


@pytest.fixture(scope="module")
def alone(job_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A job of one rank that nobody disturbs."""
    folder, env = tmp_path_factory.mktemp("alone") / "job", {"HPX_TEST_STEPS": STEPS, "HPX_TEST_SECONDS": "0"}
    known = {"workers_per_node": 1, "script": BITWISE, "settings": settings(policy="wait")}
    return run_alone(job_class(folder, nodes=1, env=env, **known))


@pytest.fixture
def running(job: Any) -> Iterator[Any]:
    made: list[Resizable] = []

    def start(
        nodes: int, each: int, spares: int = 0, parallel: str = "ddp", tiers: Sequence[Any] = (), **restart: Any
    ) -> Resizable:
        env = {"HPX_TEST_STEPS": STEPS, "HPX_TEST_SECONDS": "0.6", "HPX_TEST_PARALLEL": parallel}
        asked = settings(**restart) | ({"checkpoint": {"tiers": tiers}} if tiers else {})
        known = {"workers_per_node": each, "spares": spares, "script": BITWISE, "settings": asked}
        made.append(Resizable(job(f"job{len(made)}", nodes=nodes, env=env, **known)).start())
        return made[-1]

    yield start
    for one in made:
        one.close()


def kill(running: Resizable, *ranks: int) -> None:
    """`kill -9`, all at once. Ranks: as they are numbered now."""
    pids = {event["rank"]: event["pid"] for event in running.events() if event["event"] == "joined"}
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)


def worlds(running: Resizable) -> list[int]:
    """How many ranks have made the steps, one world after the other."""
    made = [event["world"] for event in running.events() if event["event"] == "step" and event["rank"] == 0]
    return [world for world, before in zip(made, [0, *made], strict=False) if world != before]


def test_three_of_four_ranks_make_the_next_steps_and_the_fourth_joins_them(running, alone):
    job = running(nodes=1, each=4)
    job.job.until("step", step=4, rank=1)
    kill(job, 1)
    short = job.job.until("resized", cause="continued")
    whole = job.job.until("resized", cause="rejoined")
    report = job.finish()
    assert_bitwise(job, report, alone)
    assert worlds(job) == [4, 3, 4]
    assert (short["world_size"], short["full_size"], short["pids_kept"]) == (3, 4, True)
    assert (whole["world_size"], whole["pids_kept"]) == (4, True)
    (continued,) = report["continued"]
    assert (continued["first_step"], continued["last_step"]) == (short["step"] + 1, whole["step"])
    assert (continued["ranks"], continued["of"], continued["differs"]) == (3, 4, "")
    assert report["warnings"] == []
    steps = [event["step"] for event in job.events() if event["event"] == "step" and event["rank"] == 0]
    assert steps == sorted(set(steps)), "none is made twice"
    joined = [event for event in job.events() if event["event"] == "restored" and event["generation"] == 3]
    assert sorted(event["source"] for event in joined) == ["live", "self", "self", "self"]


@pytest.mark.thorough
def test_fewer_samples_are_what_the_report_says(running, alone):
    job = running(nodes=1, each=4, samples="fewer")
    job.job.until("step", step=4, rank=1)
    kill(job, 3)
    job.job.until("resized", cause="rejoined")
    report = job.finish()
    assert report["state"] == "succeeded", report["error"]
    (continued,) = report["continued"]
    assert "3 of 4 ranks' share of the samples" in continued["differs"]
    first, last = continued["first_step"], continued["last_step"]
    (warning,) = report["warnings"]
    assert warning.startswith(f"Steps {first} to {last} were made by 3 of 4 ranks: each step had 3 of 4")
    expected = alone.wait()["losses"]
    assert [report["losses"][str(step)] for step in range(1, first)] == [expected[str(s)] for s in range(1, first)]
    assert [report["losses"][str(step)] for step in range(first, last + 2)] != [
        expected[str(step)] for step in range(first, last + 2)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [(0,), (0, 3), (1, 2, 3)])
def test_several_at_once_and_the_first_rank(running, alone, ranks):
    job = running(nodes=2, each=2)
    job.job.until("step", step=4, rank=1)
    kill(job, *ranks)
    job.job.until("resized", cause="rejoined", world_size=4)
    report = job.finish()
    assert_bitwise(job, report, alone)
    assert worlds(job)[0] == worlds(job)[-1] == 4
    assert min(worlds(job)) == 4 - len(ranks)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["rejoin_begun", "joining_worker_ready", "rank_stopped"])
def test_another_dies_while_the_replacement_of_the_first_joins(running, alone, when):
    job = running(nodes=2, each=2)
    job.job.until("step", step=4, rank=1)
    kill(job, 1)
    job.job.until(when)
    kill(job, 0)
    job.job.until("resized", cause="rejoined", world_size=4)
    assert_bitwise(job, job.finish(), alone)


@pytest.mark.thorough
def test_the_replacement_dies_before_it_has_joined(running, alone):
    job = running(nodes=2, each=2)
    job.job.until("step", step=4, rank=1)
    kill(job, 1)
    started = job.job.until("worker_started", generation=2)
    os.kill(started["pid"], signal.SIGKILL)
    job.job.until("resized", cause="rejoined", world_size=4)
    assert_bitwise(job, job.finish(), alone)
    assert [event for event in job.events() if event["event"] == "joining_worker_lost"]


@pytest.mark.thorough
@pytest.mark.parametrize("node", [0, 1])
def test_a_lost_node_is_gone_on_without_until_a_spare_has_its_ranks(running, alone, node):
    """Node 0 takes the coordinator with it."""
    job = running(nodes=2, each=2, spares=1)
    job.job.until("step", step=4, rank=1)
    job.job.agents[node].kill()
    short = job.job.until("resized", cause="continued")
    assert short["world_size"] == 2
    job.job.until("resized", cause="rejoined", world_size=4)
    report = job.finish()
    assert_bitwise(job, report, alone)
    assert report["nodes_lost"] == [node]


@pytest.mark.thorough
def test_without_a_spare_the_others_go_on_until_the_node_comes_back(running, alone):
    job = running(nodes=3, each=1, node_wait_s=1)
    job.job.until("step", step=4, rank=1)
    job.job.agents[1].kill()
    short = job.job.until("resized", cause="continued")
    job.job.until("step", step=short["step"] + 4, rank=1)  # longer than `wait` would
    job.job.agents[1] = job.job.start_agent(1, "--rejoin")
    job.job.until("resized", cause="rejoined", world_size=3)
    assert_bitwise(job, job.finish(), alone)


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_node_that_is_told_to_end_is_gone_on_without_until_it_comes_back(running, alone, node):
    """As a pod whose node is drained. Node 0 takes the coordinator with it."""
    job = running(nodes=3, each=1)
    job.job.until("step", step=4, rank=1)
    job.job.agents[node].send_signal(signal.SIGTERM)
    job.job.until("node_leaves", node=node)
    assert job.job.agents[node].wait() == 143, "what has started it starts it again"
    job.job.until("step", world=2, rank=1)
    job.job.agents[node] = job.job.start_agent(node, "--rejoin")
    job.job.until("resized", cause="rejoined", world_size=3)
    report = job.finish()
    assert_bitwise(job, report, alone)
    assert worlds(job) == [3, 2, 3]
    assert (report["nodes_lost"], report["steps_lost"], report["recoveries"]) == ([], 0, [])
    assert [(one["ranks"], one["of"]) for one in report["continued"]] == [(2, 3)]


@pytest.mark.parametrize(
    "spread", [0, pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough)]
)
def test_all_nodes_told_to_end_bring_home_the_newest_step(running, tmp_path, spread):
    """At once, or some steps apart: then the first have left before it is known that all were meant."""
    job = running(nodes=3, each=1, tiers=[{"kind": "memory"}, Directory(tmp_path / "durable").tier(every_steps=1000)])
    for number, agent in enumerate(job.job.agents[::-1]):
        job.job.until("step", step=4 + number * spread)
        agent.send_signal(signal.SIGTERM)
    report = job.job.wait()
    assert report["state"] == "cancelled"
    assert set(job.job.codes()) <= {130, 143}
    saved = {int(file.parent.name.split("-")[1]) for file in (tmp_path / "durable").rglob("step-*/manifest.json")}
    assert max(saved) in (report["steps"], report["steps"] - 1), "some ranks may not have made the last step"


@pytest.mark.thorough
@pytest.mark.parametrize(("parallel", "ranks"), [("fsdp2", 2), ("hsdp", 4)])
def test_shards_are_refused_before_the_first_step(running, parallel, ranks):
    job = running(nodes=1, each=ranks, parallel=parallel)
    job.job.until("job_ended")
    report = job.job.wait()
    assert report["state"] == "failed"
    assert "needs the whole state on every rank" in report["error"]["message"]
    assert not report["losses"]
