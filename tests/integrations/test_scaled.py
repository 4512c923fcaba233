"""Loss scalers of other people's training loops, with their real libraries: a scale is not begun anew after a fault."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integrations_env import hp_ext

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1800)]

JOB = {
    "script": "scaled.py",
    "nodes": 2,
    "workers_per_node": 1,
    "global_batch_size": 4,
    "checkpoint": {"tiers": [{"kind": "memory", "every_steps": 1}]},
    "chaos": {"compare": True},
}


@pytest.mark.parametrize("library", ["lightning", "hugging-face", "accelerate"])
def test_a_killed_worker_changes_no_scale(tmp_path: Path, library: str) -> None:
    shutil.copy(Path(__file__).with_name("scaled.py"), tmp_path)
    spec = tmp_path / "job.json"
    spec.write_text(json.dumps({"name": f"scaled-{library}", "args": [library], **JOB}))
    command = [hp_ext(), "create-job", "-f", spec, "--target", "local", "--wait", "--kill", "rank=1@step=9"]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert len(report["recoveries"]) == 1
    assert len(set(report["losses"].values())) > 8, "it learns: the scale has come down"
    assert report["loss_equal"]
    assert report["weights_equal"]
