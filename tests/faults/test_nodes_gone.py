"""A node is lost and there is no spare, or its agent stands still; who goes on, who stops, and what is said."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from nodes import events, kill_node, memory_pid

from hyperpod_ext.processes import is_alive

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

LIVE = {"HPX_TEST_NORM": "LayerNorm"}
LONG = {**LIVE, "HPX_TEST_STEPS": "100000"}


def test_without_a_spare_the_job_waits_for_another_node_and_then_says_what_was_tried(job):
    running = job(env=LONG, settings={"restart": {"node_wait_s": 1.0}}).start()
    running.until("step", step=3)
    pids = running.processes()
    kill_node(running, 1)
    report = running.wait()
    assert report["error"]["message"].startswith("node 1 is lost at step ")
    assert "the job has no spares, and no other node joined within 1 s" in report["error"]["message"]
    assert "`spares`" in report["error"]["hint"]
    assert not any(is_alive(pid) for pid in pids)


def test_an_agent_that_is_started_again_takes_the_place_of_the_lost_node(job, alike):
    running = job(env=LIVE | {"HPX_TEST_HOLD": "[[1, 2, 6]]"}).start()
    running.until("step", step=5, rank=2)
    kill_node(running, 1)
    running.agents[1].wait()
    running.until("awaiting_node", node=1)
    running.agents[1] = running.start_agent(1, "--rejoin")
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert (report["losses"], report["weights"]) == (alike["losses"], alike["weights"])
    assert report["steps_lost"] == 0
    assert running.codes() == [0, 0]


def test_when_no_majority_is_left_the_rest_stops_within_its_lease_and_says_so(job):
    running = job(env=LONG, settings={"restart": {"lease_s": 4.0}}).start()
    running.until("step", step=3)
    pids = running.processes()
    kill_node(running, 0)
    running.agents[1].wait()
    report = json.loads((running.folder / "report.node1.json").read_text())
    assert "node 1 stops: the coordinator, node 0, is lost" in report["error"]["message"]
    assert "no majority" in report["error"]["message"]
    assert "at least three nodes" in report["error"]["hint"]
    assert not (running.folder / "report.json").exists()
    assert not any(is_alive(pid) for pid in pids if pid != running.agents[0].pid)


@pytest.mark.parametrize("node", [1, 0])
def test_a_node_whose_agent_stands_still_is_lost_and_stops_when_it_runs_again(job, alike, node):
    hold = {"HPX_TEST_HOLD": json.dumps([[1, 2 * node, 6]])}
    running = job(spares=1, env=LIVE | hold, settings={"restart": {"lease_s": 4.0}}).start()
    running.until("node_joined", node=2)
    running.until("step", step=5, rank=2 * node)
    agent = running.agents[node]
    agent.send_signal(signal.SIGSTOP)
    try:
        running.until("node_replaced", node=2)
        running.until("done", rank=3)
    finally:
        agent.send_signal(signal.SIGCONT)
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert (report["losses"], report["weights"], report["steps_lost"]) == (alike["losses"], alike["weights"], 0)
    assert "silent for" in events(running, "node_lost")[0]["cause"] or node == 0
    assert agent.returncode == 7
    assert "stops:" in (running.folder / f"node{node}.log").read_text()


def test_a_memory_server_that_dies_costs_its_node_where_there_is_a_spare(job, alike, sockets):
    running = job(spares=1, env=LIVE | {"HPX_TEST_HOLD": "[[1, 2, 6]]", "HPX_SOCKET_DIR": str(sockets)}).start()
    running.until("node_joined", node=2)
    running.until("step", step=5, rank=2)
    os.kill(memory_pid(running, 1), signal.SIGKILL)
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert (report["losses"], report["weights"], report["steps_lost"]) == (alike["losses"], alike["weights"], 0)
    assert report["nodes_lost"] == [1]


def test_a_node_whose_processes_die_too_often_is_given_up_and_its_memory_is_read_from_afar(job, undisturbed):
    """Statistics of batch norm are each rank's own: nobody else has those of the dead rank at its last step."""
    chaos = {"faults": [{"rank": 2, "step": 5}]}
    running = job(spares=1, settings={"restart": {"max_on_node": 0}, "chaos": chaos}).start()
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert (report["losses"], report["weights"]) == (undisturbed["losses"], undisturbed["weights"])
    assert report["steps_lost"] == 0
    (recovery,) = report["recoveries"]
    assert (recovery["escalation_level"], recovery["source"]) == ("node", "peer")
    assert [its["node"] for its in events(running, "node_decommissioned")] == [1]
    assert running.codes() == [0, 0, 0]


def test_copies_in_other_nodes_memory_survive_the_loss_of_a_node_and_are_made_again(job, undisturbed):
    tiers = [{"kind": "memory"}, {"kind": "peer", "replicas": 1, "every_steps": 1}]
    settings = {"checkpoint": {"tiers": tiers, "when_busy": "wait"}}
    env = {"HPX_TEST_HOLD": "[[1, 2, 5], [2, 2, 9]]"}
    running = job(spares=2, settings=settings, env=env).start()
    running.until("node_joined", node=2)
    running.until("node_joined", node=3)
    for node, step in (1, 4), (2, 8):  # node 2, a spare, has the ranks of node 1 when it is lost in its turn
        running.until("copying", node=node, newest_step=step)
        kill_node(running, node)
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert (report["losses"], report["weights"]) == (undisturbed["losses"], undisturbed["weights"])
    assert [recovery["source"] for recovery in report["recoveries"]] == ["peer", "peer"]


@pytest.mark.thorough
def test_a_lost_node_of_a_parity_group_is_rebuilt_at_a_spare_and_so_is_the_next(job, undisturbed):
    tiers = [{"kind": "memory"}, {"kind": "peer", "parity": 4, "every_steps": 1}]
    settings = {"checkpoint": {"tiers": tiers, "when_busy": "wait"}}
    env = {"HPX_TEST_HOLD": "[[1, 2, 5], [2, 2, 9]]"}
    running = job(nodes=4, workers_per_node=1, spares=2, settings=settings, env=env).start()
    running.until("node_joined", node=4)
    running.until("node_joined", node=5)
    for lost, group, step in (1, (0, 1, 2, 3), 4), (3, (0, 2, 3, 4), 8):
        for node in group:
            running.until("copying", node=node, newest_step=step)
        kill_node(running, lost)
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert (report["losses"], report["weights"]) == (undisturbed["losses"], undisturbed["weights"])
    assert [recovery["source"] for recovery in report["recoveries"]] == ["parity", "parity"]
    assert report["steps_lost"] == 0


def test_a_rank_that_is_not_ready_in_time_is_named_and_replaced(job, alike, tmp_path):
    script = tmp_path / "late.py"
    tiny = Path(__file__).parent / "tiny.py"
    script.write_text(
        "import os, pathlib, runpy, time\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "if os.environ['RANK'] == '1' and not first.exists():\n"
        "    first.touch()\n"
        "    time.sleep(600)\n"
        f"runpy.run_path({str(tiny)!r})\n"
    )
    running = job(script=script, env=LIVE, settings={"restart": {"form_timeout_s": 12.0}}).start()
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert (report["losses"], report["weights"]) == (alike["losses"], alike["weights"])
    (fault,) = events(running, "fault")
    assert (fault["rank"], fault["cause"]) == (1, "was not ready for generation 1 within 12 s")
