"""Optimizers with moments of 8 bits, with the real libraries: one whose state is plain tensors recovers bit for bit,
one whose state is made of several tensors is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from integrations_env import hp_ext

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1800)]


def run_with(optimizer: str, tmp_path: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("eight_bit.py")
    shutil.copy(script, tmp_path)
    spec = tmp_path / "job.yaml"
    job = {
        "name": f"eight-bit-{optimizer}",
        "script": script.name,
        "args": [optimizer],
        "workers_per_node": 2,
        "global_batch_size": 8,
        "seed": 0,
        "checkpoint": {"tiers": [{"kind": "memory", "every_steps": 1}]},
        "chaos": {"faults": [{"kind": "kill", "rank": 1, "step": 9}], "compare": True},
    }
    spec.write_text(yaml.safe_dump(job))
    command = [hp_ext(), "create-job", "-f", spec, "--target", "local", "--wait", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_moments_of_8_bits_come_back_bit_for_bit(tmp_path: Path) -> None:
    report = run_with("bitsandbytes", tmp_path)
    assert report["state"] == "succeeded", report["error"]
    assert report["loss_equal"]
    assert report["weights_equal"]
    assert len(set(report["losses"].values())) == 16, "it learns"
    assert report["steps_lost"] == 0


def test_state_that_is_made_of_several_tensors_is_refused_by_name(tmp_path: Path) -> None:
    report = run_with("torchao", tmp_path)
    assert report["state"] == "failed"
    assert "optimizer.state.0.exp_avg is a OptimState8bit" in report["error"]["message"]
    assert "bitsandbytes" in report["error"]["hint"]
