"""Sizes beside those of transformers' own classes, which are installed below the virtual environment for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpod_ext.planner.presets import PRESETS

PIN = "transformers==5.23.0"


def installed(root: Path) -> Path:
    """A folder with transformers in it, and without a torch of its own; made on first use."""
    place = root / ".venv" / "transformers"
    ready = place / ".ready"
    if not ready.exists() or ready.read_text() != PIN:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
        try:
            subprocess.run([*pip, "--target", str(place), PIN], check=True, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            said = f"transformers cannot be installed: {getattr(error, 'stderr', '') or error}"[-300:]
            if os.environ.get("CI"):
                pytest.fail(said)
            pytest.skip(said)
        ready.write_text(PIN)
    return place


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_presets_have_the_parameters_that_transformers_builds(root: Path) -> None:
    script = root / "tests" / "support" / "transformers_sizes.py"
    environ = {**os.environ, "PYTHONPATH": str(installed(root)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert len(counts) >= 14
    assert counts == {name: PRESETS[name].count() for name in counts}
