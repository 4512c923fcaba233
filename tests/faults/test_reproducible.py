"""In-place resizes of a job with reproducible=True: the weights are those of one rank that nobody disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from resizing import Resizable, settings

SCRIPT = Path(__file__).with_name("elastic_bitwise.py")

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(240)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_four_three_one_four_is_bitwise_one_rank(job: Any, parallel: str) -> None:
    env = {"HPX_TEST_STEPS": "120", "HPX_TEST_SECONDS": "0", "HPX_TEST_PARALLEL": parallel}
    known = {"workers_per_node": 1, "script": SCRIPT, "settings": settings()}
    alone = job("alone", nodes=1, env=env, **known).start().wait()
    assert alone["state"] == "succeeded", alone["error"]
    running = Resizable(job("resized", nodes=2, env=env | {"HPX_TEST_SECONDS": "0.25"}, **known)).start()
    running.job.until("step", step=3)
    for nodes in (4, 3, 1, 4):
        assert running.resize(nodes)["nodes"] == nodes
    report = running.finish()
    assert report["state"] == "succeeded", report["error"]
    assert bits(running.events()) == bits(Resizable(job_of(running, "alone")).events())


def job_of(running: Resizable, name: str) -> Any:
    """Another job beside this one, to read its events."""
    return type(running.job)(running.job.folder.parent / name)


def bits(events: list[dict[str, Any]]) -> tuple[int, int]:
    found = {(e["weights_low"], e["weights_high"]) for e in events if e["event"] == "metric" and "weights_low" in e}
    assert len(found) == 1, "all ranks have the same"
    return found.pop()
