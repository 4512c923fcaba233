"""All processes of a node die at once; a spare takes its place, and the job ends bit for bit where it would have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nodes import events, kill_node

pytestmark = pytest.mark.slow


LIVE = {"HPX_TEST_NORM": "LayerNorm"}
"""All state is the same on every rank, so that each node's is the others' copy."""


def report_of(running: Any, node: int) -> dict[str, Any]:
    return json.loads((running.folder / f"report.node{node}.json").read_text())


def assert_equal_to(alike: dict[str, Any], report: dict[str, Any]) -> None:
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == alike["losses"]
    assert report["weights"] == alike["weights"]
    assert report["metrics"] == alike["metrics"]
    assert report["steps_lost"] == 0


@pytest.mark.parametrize("node", [pytest.param(1, marks=pytest.mark.thorough), 0])
def test_a_spare_takes_the_place_of_a_node_that_is_killed(job, alike, node):
    running = job(spares=1, env=LIVE | {"HPX_TEST_HOLD": json.dumps([[1, 2 * node, 6]])}).start()
    running.until("node_joined", node=2)
    running.until("step", step=5, rank=2 * node)
    kill_node(running, node)
    report = running.wait()
    assert_equal_to(alike, report)
    (recovery,) = report["recoveries"]
    assert recovery["fault"]["node"] == node
    assert recovery["escalation_level"] == "node"
    assert recovery["survivor_pids_kept"]
    assert report["nodes_lost"] == [node]
    assert [(its["node"], its["ranks"]) for its in events(running, "node_replaced")] == [(2, [2 * node, 2 * node + 1])]
    assert [agent.returncode for agent in running.agents] == [-9 if its == node else 0 for its in range(3)]
    coordinators = [its["node"] for its in events(running, "coordinator")]
    assert coordinators == ([1] if node == 0 else [])


@pytest.mark.thorough
def test_nodes_that_speak_tls_are_replaced_as_others_are(job, alike):
    """The first one, so that another coordinates; what the spare restores comes from the memory of a peer."""
    settings = {"network": {"tls": True}}
    running = job(spares=1, settings=settings, env=LIVE | {"HPX_TEST_HOLD": json.dumps([[1, 0, 6]])}).start()
    running.until("node_joined", node=2)
    running.until("step", step=5, rank=0)
    kill_node(running, 0)
    report = running.wait()
    assert_equal_to(alike, report)
    assert report["nodes_lost"] == [0]
    assert [its["node"] for its in events(running, "coordinator")] == [1]


def test_two_nodes_in_turn_the_first_one_and_its_successor(job, alike):
    """Of four nodes: the second is lost once the job goes on without the first, or they would be half of it at once."""
    running = job(spares=2, env=LIVE | {"HPX_TEST_HOLD": json.dumps([[1, 0, 5], [2, 2, 9]])}).start()
    running.until("node_joined", node=2)
    running.until("node_joined", node=3)
    for rank, step in (0, 4), (2, 8):
        running.until("step", step=step, rank=rank)
        kill_node(running, rank // 2)
    report = running.wait()
    assert_equal_to(alike, report)
    assert [recovery["fault"]["node"] for recovery in report["recoveries"]] == [0, 1]
    assert [its["node"] for its in events(running, "coordinator")] == [1, 2]
    assert report["nodes_lost"] == [0, 1]
