"""DeepSpeed's engine, the real package: two kills change no bit, and what cannot be restored is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integrations_env import hp_ext
from killed_twice import AT_ONCE, MEMORY, SCRIPTS, run_killed

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("stage", "precision", "micro_batches"),
    [("1", "bf16", "1"), ("2", "bf16", "2"), ("2", "fp32", "1")],
)
def test_two_kills_change_no_bit(tmp_path: Path, stage: str, precision: str, micro_batches: str) -> None:
    report = run_killed(
        tmp_path,
        "deepspeed_engine.py",
        stage,
        precision,
        micro_batches,
        batch=8 * int(micro_batches),
        environment="deepspeed",
        checkpoint=AT_ONCE,
    )
    assert len(set(report["losses"].values())) == 16, "it learns"


def test_another_number_of_ranks_continues_from_the_same_vectors(tmp_path: Path) -> None:
    """ZeRO pads its flat vectors for each number of ranks differently."""
    tiers = [MEMORY, {"kind": "file", "path": str(tmp_path / "durable"), "every_steps": 8}]
    assert "8 steps on 2 ranks" in run(tmp_path, 2, "2", "bf16", "1", "8", checkpoint={"tiers": tiers}).stdout
    assert "steps 9 to 10 on 3 ranks" in run(tmp_path, 3, "2", "bf16", "1", "10", checkpoint={"tiers": tiers}).stdout
    end, start = json.loads((tmp_path / "end-2.json").read_text()), json.loads((tmp_path / "start-3.json").read_text())
    assert len(end) == 6, "weights and two moments of two groups"
    assert end == start


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("3", "bf16", "1"), "DeepSpeedZeroOptimizer_Stage3, and ZeRO-1 or ZeRO-2 is needed"),
        (("0", "fp32", "1"), "keep_engine: the engine's optimizer is a "),
        (("2", "cpu", "1"), "zero_optimization.offload_optimizer is not supported"),
        (("2", "mpu", "1"), "ZeRO divides the state among groups of 1 of the 2 ranks"),
        (("2", "tuple", "1"), "keep_engine: build returned a tuple instead of DeepSpeed's engine"),
        (("2", "fp32", "2", "16", "early"), "a step of run.steps ended before the optimizer step"),
    ],
)
def test_engines_that_cannot_be_restored_are_refused(tmp_path: Path, words: tuple[str, ...], named: str) -> None:
    done = run(tmp_path, 2, *words)
    assert done.returncode == 7
    assert named in done.stderr


def run(folder: Path, ranks: int, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the script on one node with `ranks` ranks."""
    shutil.copy(SCRIPTS / "deepspeed_engine.py", folder)
    job = {"name": "zero", "script": "deepspeed_engine.py", "args": list(args), "workers_per_node": ranks}
    (folder / "job.json").write_text(json.dumps(job | {"env": {"SAMPLES": str(folder)}} | options))
    command = [hp_ext("deepspeed"), "create-job", "-f", folder / "job.json", "--target", "local", "--wait"]
    env = os.environ | {"HPX_HOME": str(folder / "home")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
