"""Nodes that come from a queue: an order waits for all that come for it, however long that takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from event_log import events_in
from resizing import ELASTIC, settings

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_an_order_waits_for_the_nodes_that_come_for_it(job: Any) -> None:
    env = {"HPX_TEST_STEPS": "600", "HPX_TEST_SECONDS": "0.1"}
    made = settings(elastic={"scaling_timeout_s": 1})  # an order that is taken at once gives up after it
    running = job(nodes=1, workers_per_node=1, script=ELASTIC, settings=made, env=env).start()
    running.until("step", step=3)
    (running.folder / "resizes").mkdir()
    (running.folder / "resizes" / "grow.json").write_text(json.dumps({"nodes": 3, "joining": [2, 3]}))
    running.agents.append(running.start_agent(3, "--rejoin"))
    running.until("node_joined", node=3)
    now = running.until("step")["step"]
    running.until("step", step=now + 25)  # more than the second after which it would have been refused
    assert not [event for event in told(running) if event.get("order") == "grow"]
    running.agents.append(running.start_agent(2, "--rejoin"))
    grown = running.until("resized")
    assert (grown["order"], grown["of"], grown["nodes"], grown["pids_kept"]) == ("grow", 1, 3, True)
    (running.folder / "hurry").touch()
    report = running.wait()
    assert (report["state"], report["recoveries"]) == ("succeeded", []), report["error"]


def told(running: Any) -> list[dict[str, Any]]:
    return events_in(running.folder / "events.jsonl")
