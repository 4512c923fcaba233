"""A Spot instance is to be interrupted: its node leaves the job before, and the others go on."""

from __future__ import annotations

from typing import Any

import pytest
from instance_metadata import NOTICE, instance_metadata
from resizing import ELASTIC, settings

pytestmark = [pytest.mark.slow]


def test_a_node_leaves_when_ec2_gives_notice_and_the_others_keep_their_processes(job: Any) -> None:
    with instance_metadata() as imds:
        env = {
            "HPX_TEST_STEPS": "400",
            "HPX_TEST_SECONDS": "0.1",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.of("stays"),
        }
        env_of = {1: {"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.of("spot")}}
        made = settings(elastic={"notices": {"ec2": True, "every_s": 0.1}})
        known = {"workers_per_node": 1, "script": ELASTIC, "settings": made, "env": env, "env_of": env_of}
        running = job(nodes=2, **known).start()
        running.until("step", step=3)
        imds.notices["spot"] = NOTICE
        notice = running.until("preemption_notice")
        left = running.until("resized")
        assert running.agents[1].wait() == 0
        (running.folder / "hurry").touch()
        report = running.wait()
    assert (notice["node"], notice["cause"]) == (1, "EC2 will terminate this Spot instance")
    assert (left["of"], left["nodes"], left["cause"], left["pids_kept"]) == (2, 1, "leave", True)
    assert left["t"] - notice["t"] < 60, "half of what EC2 gives"
    assert (report["state"], report["nodes_lost"], report["recoveries"]) == ("succeeded", [], []), report["error"]
    assert len(report["losses"]) == 400
