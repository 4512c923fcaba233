"""One process dies or raises; training goes on where it was, and ends bit for bit where it would have."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from nodes import memory_pid

from hyperpod_ext.processes import descendants

pytestmark = pytest.mark.slow


def assert_equal_to(undisturbed: dict[str, Any], report: dict[str, Any]) -> None:
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == undisturbed["losses"]
    assert report["weights"] == undisturbed["weights"]
    assert report["metrics"] == undisturbed["metrics"]
    assert report["steps_lost"] == 0


@pytest.mark.thorough
def test_a_fork_server_that_is_killed_is_started_again_and_forks_the_next_worker(job, undisturbed):
    """No rank is its child: all train on, and the one that is killed next has a successor. The job has no spare."""
    running = job(env={"HPX_TEST_HOLD": "[[1, 3, 5]]"}, cold=True).start()
    workers = {running.until("worker_started", rank=rank)["pid"]: rank for rank in (2, 3)}
    running.until("step", step=4)
    helpers = (
        set(descendants(running.agents[1].pid)) - workers.keys()
    )  # workers are forked, and have the same command line
    (fork_server,) = [pid for pid in helpers if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(fork_server, signal.SIGKILL)
    assert running.until("fork_server_lost")["cause"] == "the process that forks workers killed by SIGKILL (9)"
    os.kill(next(pid for pid, rank in workers.items() if rank == 3), signal.SIGKILL)
    report = running.wait()
    assert_equal_to(undisturbed, report)
    assert [recovery["fault"]["rank"] for recovery in report["recoveries"]] == [3]
    assert [event for event in running.events() if event["event"] == "node_lost"] == []


@pytest.mark.parametrize("what", ["rank", "memory server"])
def test_sockets_that_somebody_removes_are_made_again(job, undisturbed, sockets, what):
    """As those do who clean the temporary directory. Until then no process could be started, and none saved."""
    running = job(env={"HPX_TEST_HOLD": "[[1, 3, 5]]", "HPX_SOCKET_DIR": str(sockets)}).start()
    pid = running.until("worker_started", rank=3)["pid"]
    running.until("step", step=4)
    victim = memory_pid(running, 1) if what == "memory server" else pid
    shutil.rmtree(sockets)
    os.kill(victim, signal.SIGKILL)
    if what == "memory server":
        running.until("memory_back")
    (running.folder / "let-go").touch()
    assert_equal_to(undisturbed, running.wait())


@pytest.mark.parametrize(
    ("rank", "step"),
    [(0, 1), pytest.param(2, 2, marks=pytest.mark.thorough), pytest.param(1, 7, marks=pytest.mark.thorough), (3, 12)],
)
def test_a_rank_killed_by_its_agent_is_replaced_and_no_other_process_is(job, undisturbed, rank, step):
    report = job(settings={"chaos": {"faults": [{"rank": rank, "step": step}]}}).start().wait()
    assert_equal_to(undisturbed, report)
    (recovery,) = report["recoveries"]
    fault = {name: recovery["fault"][name] for name in ("rank", "node", "step", "kind", "cause")}
    killed = {"kind": "signal", "cause": "killed by SIGKILL (9)"}
    assert fault == {"rank": rank, "node": rank // 2, "step": step, **killed}
    assert recovery["survivor_pids_kept"]
    assert set(recovery["phases"]) == {
        "fault_seen",
        "survivors_freed",
        "new_member",
        "groups_back",
        "state_back",
        "first_new_step",
    }


def test_a_death_at_any_point_of_a_step_changes_no_number(job, undisturbed):
    places = {"before backward": [1, 4], "before optimizer": [2, 6], "after optimizer": [3, 8]}
    report = job(fault={"each": places}).start().wait()
    assert_equal_to(undisturbed, report)
    assert [(each["fault"]["rank"], each["fault"]["step"]) for each in report["recoveries"]] == [(1, 4), (2, 6), (3, 8)]
    assert all(each["survivor_pids_kept"] for each in report["recoveries"])


def test_two_deaths_at_once(job, undisturbed):
    faults = [{"rank": 1, "step": 5}, {"rank": 2, "step": 5}]
    report = job(settings={"chaos": {"faults": faults}}).start().wait()
    assert_equal_to(undisturbed, report)


def test_an_exception_on_one_rank_is_recovered_in_process(job, undisturbed):
    report = job(fault={"what": "exception", "rank": 2, "step": 5}).start().wait()
    assert_equal_to(undisturbed, report)
    (recovery,) = report["recoveries"]
    assert recovery["fault"]["cause"].startswith("ValueError: bad sample at step 5 (tiny.py:")
    assert recovery["survivor_pids_kept"]


def test_a_process_that_cannot_use_its_gpu_any_more_is_replaced(job, undisturbed):
    """As after any CUDA error that its context does not outlive; here only the exception is one."""
    running = job(fault={"what": "illegal access", "rank": 2, "step": 5}).start()
    before = running.until("joined", rank=2)["pid"]
    report = running.wait()
    assert_equal_to(undisturbed, report)
    (recovery,) = report["recoveries"]
    assert recovery["fault"]["cause"].startswith("RuntimeError: CUDA error: an illegal memory access was encountered")
    assert recovery["survivor_pids_kept"]
    (fault,) = (entry for entry in running.events() if entry["event"] == "fault")
    assert (fault["kind"], fault["died"], fault["escalation_level"]) == ("exception", True, "process")
    joined = [entry["pid"] for entry in running.events() if entry["event"] == "joined" and entry["rank"] == 2]
    assert before in joined
    assert len(set(joined)) == 2


def test_state_torn_on_every_rank_comes_back_from_memory(job, undisturbed):
    """All ranks fail between the optimizer and the schedule: nobody's live state is whole."""
    report = job(fault={"what": "torn", "rank": -1, "ranks": [0, 1, 2, 3], "step": 6}).start().wait()
    assert_equal_to(undisturbed, report)
    assert report["recoveries"][0]["source"] == "memory"
    assert report["recoveries"][0]["resumed_step"] == 5


ALL = [0, 1, 2, 3]


def corrupt(**more: Any) -> dict[str, Any]:
    """Nobody's live state is whole, and memory that rank 1 had sealed is damaged."""
    return {"what": "torn and corrupt", "rank": 1, "ranks": ALL, "step": 6, **more}


def test_a_corrupt_snapshot_is_refused_and_an_older_step_is_taken_by_all(job, undisturbed):
    """State that is partly each rank's own can come from nowhere else."""
    running = job(fault=corrupt(slots=[1])).start()  # of steps 0 to 5 in turn, the newest
    assert running.until("restore_failed")["rank"] == 1
    report = running.wait()
    assert (report["losses"], report["weights"]) == (undisturbed["losses"], undisturbed["weights"])
    assert report["recoveries"][0]["resumed_step"] == 4
    assert report["steps_lost"] == 1


def test_a_corrupt_snapshot_is_refused_and_another_ranks_is_taken(job, alike):
    """State that is the same on all ranks comes from a neighbour; no step is lost."""
    running = job(fault=corrupt(slots=[0, 1]), env={"HPX_TEST_NORM": "LayerNorm"}).start()
    refused = running.until("restore_failed")
    assert refused["rank"] == 1
    assert "CRC64-NVME" in refused["error"]
    assert_equal_to(alike, running.wait())


@pytest.mark.parametrize(
    ("variant", "place"),
    [
        pytest.param("HPX_TEST_ZERO_LAST", "before backward", marks=pytest.mark.thorough),
        ("HPX_TEST_FUSED", "after optimizer"),
    ],
)
def test_other_habits_of_training_loops_are_exact_too(job, variant, place):
    """Gradients cleared at the end of a step; an optimizer whose changes no counter tells of."""
    env = {variant: "1", "HPX_TEST_NORM": "LayerNorm"}
    undisturbed = job("undisturbed", env=env).start().wait()
    report = job(env=env, fault={"what": place, "rank": 1, "step": 6}).start().wait()
    assert_equal_to(undisturbed, report)


def test_a_replacement_that_dies_while_groups_are_opened_is_replaced_again(job, undisturbed):
    # held where it comes to a step before it is killed
    env = {"HPX_TEST_HOLD": "[[2, 1, 4]]"}
    running = job(settings={"chaos": {"faults": [{"rank": 1, "step": 4}]}}, env=env).start()
    joining = 0
    for event in running.events():
        if event["event"] == "worker_started" and event["rank"] == 1:
            joining = event["pid"]
        if event["event"] == "generation" and event["generation"] == 2:
            os.kill(joining, signal.SIGKILL)
            break
    report = running.wait()
    assert_equal_to(undisturbed, report)
    assert report["generations"] >= 3


def test_children_of_a_dead_worker_hold_nothing_up(job, undisturbed):
    report = job(fault={"what": "leaves a child", "rank": 2, "step": 5}).start().wait()
    assert_equal_to(undisturbed, report)


def test_a_tier_that_cannot_be_written_ends_the_job_before_training(sharded, tmp_path):
    (tmp_path / "tier").write_text("in the way")
    report = sharded("a", tiers=[{"kind": "memory"}, {"kind": "file", "path": str(tmp_path / "tier")}]).start().wait()
    assert report["state"] == "failed"
    # the store is tried by its tier, and by the health check of each node's disk: whoever is first says it
    assert report["error"]["code"] in ("UnreachableError", "JobFailedError")
    assert str(tmp_path / "tier") in report["error"]["message"]


ASKS_WORLD = Path(__file__).with_name("asks_world.py")


def test_a_survivor_whose_state_asks_for_the_process_group_keeps_its_process(job):
    """The live state is looked at before the groups are destroyed, not after: `Default process group has not been
    initialized` ended it."""
    undisturbed = job("undisturbed", script=ASKS_WORLD, workers_per_node=1).start().wait()
    disturbed = job("disturbed", script=ASKS_WORLD, workers_per_node=1, env={"HPX_CHAOS": "sigkill:rank=0,step=4"})
    report = disturbed.start().wait()
    assert_equal_to(undisturbed, report)
    assert ranks_that_failed(disturbed) == [0]


def ranks_that_failed(job: Any) -> list[int]:
    return [event["rank"] for event in job.events() if event["event"] == "fault"]


def test_a_survivor_whose_state_needs_others_offers_none_and_keeps_its_process(job):
    env = {"HPX_TEST_COLLECTIVE": "1"}
    undisturbed = job("undisturbed", script=ASKS_WORLD, workers_per_node=1, env=env).start().wait()
    env |= {"HPX_CHAOS": "sigkill:rank=0,step=4"}
    running = job("disturbed", script=ASKS_WORLD, workers_per_node=1, env=env).start()
    report = running.wait()
    assert_equal_to(undisturbed, report)
    assert ranks_that_failed(running) == [0]
    assert "cannot be read after a fault" in (running.folder / "logs/rank1.log").read_text()
