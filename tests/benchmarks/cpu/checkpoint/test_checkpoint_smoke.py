from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[4] / "benchmarks" / "cpu" / "checkpointing.py"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_quick_run_measures_saves_training_and_kill_9(tmp_path):
    command = [sys.executable, str(PROGRAM), "--quick", "--systems", "memcpy", "torch.save", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "checkpoint.json").read_text())
    assert document["failures"] == []
    assert document["survived"] == {"torch.save": [1, 1]}
    for figure in ("blocked", "first", "lost", "every_step", "memory"):
        assert set(document["medians"][figure]) == {"memcpy", "torch.save"}
    assert document["medians"]["restore"]["torch.save"]["n"] == 1
    assert (tmp_path / "checkpoint.svg").read_text().startswith("<?xml")
    assert "python benchmarks/cpu/checkpointing.py" in (tmp_path / "checkpoint.md").read_text()
