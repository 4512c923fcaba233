"""Trainers that choose their samples themselves, with the real libraries: groups and pairs stay whole, and two kills
change no bit."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integrations_env import hp_ext

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]


def run_twice_killed(
    folder: Path, script: str, kind: str, batch: int, kills: tuple[str, ...]
) -> tuple[dict[str, Any], list[Any]]:
    """The report, and what the ranks wrote of their samples."""
    shutil.copy(Path(__file__).with_name(script), folder)
    job = {"name": f"own-{kind}", "script": script, "args": [kind], "workers_per_node": 2, "global_batch_size": batch}
    job |= {"checkpoint": {"tiers": [{"kind": "memory", "every_steps": 1}]}, "chaos": {"compare": True}}
    job |= {"env": {"SAMPLES": str(folder)}}
    (folder / "job.json").write_text(json.dumps(job))
    command = [hp_ext(), "create-job", "-f", folder / "job.json", "--target", "local", "--wait", "-o", "json"]
    for kill in kills:
        command += ["--kill", kill]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert len(report["recoveries"]) == len(kills)
    assert report["loss_equal"]
    assert report["weights_equal"]
    seen = [json.loads(line) for path in folder.glob("samples-*.jsonl") for line in path.read_text().splitlines()]
    return report, seen


@pytest.mark.parametrize("kind", ["groups", "reused", "leave-one-out"])
def test_completions_are_compared_with_others_of_the_same_prompt(tmp_path: Path, kind: str) -> None:
    _, seen = run_twice_killed(tmp_path, "own_samplers.py", kind, 8, ("rank=1@step=7", "rank=0@step=12"))
    assert seen
    assert all(prompts[::2] == prompts[1::2] for prompts in seen), "neighbours have one prompt"
    assert len({each for prompts in seen for each in prompts}) > 4


@pytest.mark.parametrize(("kind", "batch"), [("preferences", 8), ("pairs", 8), ("noisy", 16), ("by-length", 8)])
def test_samplers_of_all_kinds_go_on_where_they_were(tmp_path: Path, kind: str, batch: int) -> None:
    """KTO; batches without a text twice, of two datasets; weighted, with epochs that end with a smaller step."""
    run_twice_killed(tmp_path, "own_samplers.py", kind, batch, ("rank=1@step=5", "rank=0@step=9"))


@pytest.mark.parametrize(("kind", "steps"), [("average", 18), ("stops-early", 14), ("own", 18)])
def test_callbacks_of_lightning_remember(tmp_path: Path, kind: str, steps: int) -> None:
    report, _ = run_twice_killed(tmp_path, "callbacks.py", kind, 8, ("rank=1@step=11",))
    assert max(map(int, report["losses"])) == steps
