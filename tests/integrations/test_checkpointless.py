"""Tier 4 of AWS's launch article as printed, with Lightning's Trainer: a kill -9 changes no bit of any loss."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from integrations_env import hp_ext
from local_place import LocalPlace

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]
SCRIPT = Path(__file__).with_name("checkpointless.py")


def run(folder: Path, *options: str, case: str = "") -> subprocess.CompletedProcess[str]:
    shutil.copy(SCRIPT, folder / "train.py")
    command = [hp_ext(), "run", "--workers", "2", "--compat", "aws", "-o", "json", *options, "train.py", case]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=folder)


def test_a_killed_rank_changes_no_loss(place: LocalPlace, tmp_path: Path) -> None:
    done = run(tmp_path, "--kill", "rank=1@step=13")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["weights_equal"]
    assert report["loss_equal"]
    (recovery,) = report["recoveries"]
    assert recovery["survivor_pids_kept"], "the healthy process stayed"
    losses = set(re.findall(r"loss [01] \d+ \S+", done.stderr))
    assert len(losses) == 2 * 20, "a repeated step has the same loss"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("divided", "CheckpointlessMegatronStrategy(tensor_model_parallel_size=2): with `compat: aws` each rank has"),
        ("unreported", "Add CheckpointlessCallback() to callbacks."),
    ],
)
def test_trainers_that_would_not_be_protected_are_refused(
    place: LocalPlace, tmp_path: Path, case: str, words: str
) -> None:
    done = run(tmp_path, case=case)
    assert done.returncode == 7
    assert words in done.stderr
