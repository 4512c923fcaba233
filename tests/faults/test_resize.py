"""Nodes come to a job that runs, and leave it, or are lost: those that stay keep their processes."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from durable_place import Directory
from nodes import kill_node
from resizing import BITWISE, ELASTIC, Resizable, assert_bitwise, assert_went_on, run_alone, settings

pytestmark = [pytest.mark.slow]

STEPS, FEWER = "160", "80"
WITH_PEERS = [{"kind": "memory"}, {"kind": "peer", "every_steps": 1, "max_slowdown": 1.0}]


@pytest.fixture(scope="module")
def undisturbed(job_class: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of two nodes that nobody disturbs."""
    env = {"HPX_TEST_STEPS": STEPS, "HPX_TEST_SECONDS": "0"}
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    report = job_class(folder, workers_per_node=1, script=ELASTIC, settings=settings(), env=env).start().wait()
    assert report["state"] == "succeeded", report["error"]
    assert len(report["losses"]) == int(STEPS)
    return dict(report)


@pytest.fixture(scope="module")
def alone(job_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives a job of one rank that nobody disturbed, with sums of gradients that have no order."""

    @functools.cache
    def run(parallel: str) -> Any:
        env = {"HPX_TEST_STEPS": FEWER, "HPX_TEST_SECONDS": "0", "HPX_TEST_PARALLEL": parallel}
        folder, known = tmp_path_factory.mktemp(parallel) / "job", {"workers_per_node": 1, "script": BITWISE}
        return run_alone(job_class(folder, nodes=1, settings=settings(), env=env, **known))

    return run


@pytest.fixture
def resizable(job: Any) -> Iterator[Any]:
    made: list[Resizable] = []

    def make(
        parallel: str = "ddp",
        nodes: int = 2,
        script: Path = ELASTIC,
        workers_per_node: int = 1,
        spares: int = 0,
        **more: Any,
    ) -> Resizable:
        steps, seconds = (STEPS, "0.4") if script is ELASTIC else (FEWER, "0.8")
        env = {"HPX_TEST_STEPS": steps, "HPX_TEST_SECONDS": seconds, "HPX_TEST_PARALLEL": parallel}
        known: dict[str, Any] = {"workers_per_node": workers_per_node, "spares": spares, "script": script}
        known["settings"] = settings(**more)
        made.append(Resizable(job(f"job{len(made)}", nodes=nodes, env=env, **known)).start())
        made[-1].job.until("step", step=3)
        return made[-1]

    yield make
    for one in made:
        one.close()


def pids(resized: Resizable, generation: int) -> dict[int, int]:
    """Process of each rank in a generation."""
    events = resized.events()
    begins = [i for i, e in enumerate(events) if e["event"] == "generation" and e["generation"] == generation]
    return {e["rank"]: e["pid"] for e in events[: begins[0]] if e["event"] == "joined"}


def test_a_job_grows_and_shrinks_and_those_who_stay_keep_their_processes(resizable, undisturbed, tmp_path):
    durable = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": str(tmp_path / "durable"), "every_steps": 50}]}
    running = resizable(checkpoint=durable)
    grown = running.resize(3)
    assert (grown["of"], grown["nodes"], grown["pids_kept"]) == (2, 3, True)
    shrunk = running.resize(2)
    assert (shrunk["of"], shrunk["nodes"], shrunk["pids_kept"]) == (3, 2, True)
    report = running.finish()
    assert_went_on(running, report, undisturbed)
    assert pids(running, 1).items() <= pids(running, 2).items()
    assert running.job.agents[2].wait() == 0
    assert len([e for e in running.events() if e["event"] == "durable"]) == 1, "asked once, at the very start"
    worlds = [e["world"] for e in running.events() if e["event"] == "step" and e["rank"] == 0]
    assert [world for world, before in zip(worlds[1:], worlds, strict=False) if world != before] == [3, 2]
    assert [(r["of"], r["nodes"]) for r in report["resizes"]] == [(2, 3), (3, 2)]


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "hsdp", "norm"])
def test_two_four_three_one_four(resizable, undisturbed, parallel):
    running = resizable(parallel)
    resizes = [running.resize(nodes) for nodes in (4, 3, 1, 4)]
    report = running.finish()
    if parallel == "norm":  # its statistics are of one rank's samples: no number of ranks is like another
        assert report["state"] == "succeeded"
    else:
        assert_went_on(running, report, undisturbed)
    assert all(resize["pids_kept"] for resize in resizes)
    assert report["recoveries"] == []


@pytest.mark.thorough
def test_shards_are_cut_anew_from_memory(resizable, undisturbed):
    running = resizable("fsdp2")
    grown, shrunk = running.resize(3), running.resize(2)
    report = running.finish()
    assert_went_on(running, report, undisturbed)
    assert grown["pids_kept"]
    assert shrunk["pids_kept"]


@pytest.mark.thorough
@pytest.mark.parametrize(("parallel", "nodes"), [("hsdp", 2), ("fsdp2", 1), ("mesh", 2)])
def test_what_was_never_saved_is_at_hand_where_all_stop(resizable, undisturbed, parallel, nodes):
    """Each of these ranks has all of the state, but in objects that are built anew for another world."""
    running = resizable(parallel, nodes=nodes, checkpoint={"tiers": [{"kind": "memory", "every_steps": 1000}]})
    assert running.resize(3)["pids_kept"]
    assert_went_on(running, running.finish(), undisturbed)
    events = running.events()
    assert not [e for e in events if e["event"] == "restore_failed"], "each has what the others were told"
    steps = [e["step"] for e in events if e["event"] == "step" and e["rank"] == 0]
    assert steps == list(range(1, int(STEPS) + 1)), "none is made twice"


def test_a_node_that_is_told_to_end_leaves_and_the_others_go_on(resizable, undisturbed):
    """SIGTERM, as a spot notice or a scheduler sends it; and it is the first node, where the job is coordinated."""
    running = resizable(nodes=3)
    running.job.agents[0].send_signal(signal.SIGTERM)
    left = running.job.until("resized")
    assert (left["of"], left["nodes"], left["cause"], left["pids_kept"]) == (3, 2, "leave", True)
    assert running.job.agents[0].wait() == 0
    report = running.finish()
    assert_went_on(running, report, undisturbed)
    assert report["nodes_lost"] == []


def test_a_node_that_is_gone_is_done_without(resizable, undisturbed):
    running = resizable(nodes=3)
    running.job.agents[1].kill()
    lost = running.job.until("resized")
    assert (lost["of"], lost["nodes"], lost["cause"], lost["pids_kept"]) == (3, 2, "lost", True)
    report = running.finish()
    assert_went_on(running, report, undisturbed)
    assert report["nodes_lost"] == [1]


MOMENTS = ["resize_begun", "resize_prepared", "rank_stopped", "world"]


def struck() -> Iterator[Any]:
    """Each pair of who is killed and when under one kind of parallelism; under the other in `make soak`."""
    for number, who in enumerate(["leaver", "joiner", "coordinator"]):
        for moment in MOMENTS:
            if (who, moment) != ("leaver", "resize_prepared"):  # to shrink nobody needs to be prepared
                both = ["ddp", "fsdp2"]
                often = both[(number + MOMENTS.index(moment)) % 2]
                for parallel in both:
                    yield pytest.param(parallel, who, moment, marks=[pytest.mark.soak] * (parallel != often))


@pytest.mark.thorough
@pytest.mark.parametrize(("parallel", "who", "moment"), [*struck()])
def test_a_kill_in_the_middle_of_a_resize_leaves_a_job_that_goes_on_bitwise(resizable, alone, parallel, who, moment):
    policy = {"checkpoint": {"tiers": WITH_PEERS}} if parallel == "fsdp2" else {}
    running = resizable(parallel, nodes=4 if who == "leaver" else 3, script=BITWISE, **policy)
    target = {"leaver": 3, "joiner": 3, "coordinator": 0}[who]
    running.order(3 if who == "leaver" else 4)
    running.job.until(moment)
    running.job.agents[target].kill()
    running.job.until("coordinator" if who == "coordinator" else "node_lost")
    running.job.until("resized")
    assert_bitwise(running, running.finish(), alone(parallel))


@pytest.mark.thorough
@pytest.mark.parametrize(("parallel", "nodes", "tiers"), [("fsdp2", 3, WITH_PEERS), ("hsdp", 4, WITH_PEERS[:1])])
def test_shards_of_a_lost_node_come_from_copies_on_others(resizable, undisturbed, parallel, nodes, tiers):
    """Of a peer tier; HSDP has them by itself, in the replicas of other nodes."""
    running = resizable(parallel, nodes=nodes, checkpoint={"tiers": tiers})
    running.job.until("step", step=8)
    running.job.agents[1].kill()
    lost = running.job.until("resized")
    assert (lost["of"], lost["nodes"], lost["cause"]) == (nodes, nodes - 1, "lost")
    assert_went_on(running, running.finish(), undisturbed)


@pytest.mark.thorough
def test_eight_nodes_of_two_go_through_a_kill_a_lost_node_a_resize_and_the_loss_of_two_coordinators(resizable, alone):
    """16 ranks; and every loss and weight is that of one rank which nobody disturbs, bit for bit."""
    elastic = {"min_nodes": 3, "max_nodes": 8}
    running = resizable(nodes=8, workers_per_node=2, spares=1, script=BITWISE, elastic=elastic)
    job = running.job
    job.until("node_joined", node=8)
    os.kill(pids(running, 1)[11], signal.SIGKILL)
    job.until("step", generation=2)
    kill_node(job, 3)
    job.until("node_lost", node=3)
    job.until("step", generation=3)
    shrunk = running.resize(6)
    assert (shrunk["of"], shrunk["nodes"], shrunk["pids_kept"]) == (8, 6, True)
    kill_node(job, 0)
    replaced = job.until("node_replaced", ranks=[0, 1])
    assert replaced["node"] in (6, 7), "the resize let it go, and it stayed as the spare that the job began with"
    job.until("step", generation=5)
    kill_node(job, 1)  # which coordinates the job by now, and there is no spare
    lost = job.until("resized", cause="lost")
    assert (lost["of"], lost["nodes"], lost["pids_kept"]) == (6, 4, True), "of five each batch would have no even share"
    report = running.finish()
    assert_bitwise(running, report, alone("ddp"))
    assert report["nodes_lost"] == [0, 1, 3]
    assert report["steps_lost"] == 0


def test_all_nodes_told_to_end_is_the_end_of_the_job(resizable):
    running = resizable()
    for agent in running.job.agents:
        agent.send_signal(signal.SIGTERM)
    assert running.job.wait()["state"] == "cancelled"
    assert set(running.job.codes()) == {130}


@pytest.mark.thorough
@pytest.mark.parametrize("spread", [1, 3, 6])
def test_nodes_told_to_end_one_after_the_other_bring_home_the_newest_step(resizable, tmp_path, spread):
    """The first may have left by then, and the others may just be about to go on without them."""
    tiers = [{"kind": "memory"}, Directory(tmp_path / "durable").tier(every_steps=1000)]
    job = resizable("fsdp2", nodes=3, checkpoint={"tiers": tiers}).job
    for number, agent in enumerate(job.agents[::-1]):
        job.until("step", step=4 + number * spread)
        agent.send_signal(signal.SIGTERM)
    report = job.wait()
    assert report["state"] == "cancelled"
    saved = {int(file.parent.name.split("-")[1]) for file in (tmp_path / "durable").rglob("step-*/manifest.json")}
    assert max(saved) in (report["steps"], report["steps"] - 1), "some ranks may not have made the last step"
