"""A node that is ill says why, and is not used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

CHECK = """
import sys

def fans(context):
    node = sys.argv[sys.argv.index("--node-rank") + 1]
    return "they stand still" if node == "1" else None
"""


def with_check(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "own_checks.py").write_text(CHECK)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    health = {"checks": ["disk", "own_checks:fans"]}
    return {"env": {"PYTHONPATH": path}, "settings": {"restart": {"health": health}}, **more}


def test_without_a_spare_the_job_ends_and_names_node_check_and_reason(job, tmp_path):
    report = job(**with_check(tmp_path)).start().wait()
    assert report["state"] == "failed"
    assert "it cannot run a worker: own_checks:fans: they stand still" in report["error"]["message"]
    assert "node 1" in report["error"]["message"]
    assert report["steps"] == 0


def test_a_spare_takes_its_place_though_it_comes_late(job, undisturbed, tmp_path):
    running = job(**with_check(tmp_path, spares=1)).start(later=[2])
    running.until("awaiting_node", node=1)
    running.agents.append(running.start_agent(2))
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["losses"] == undisturbed["losses"]
    assert report["weights"] == undisturbed["weights"]
