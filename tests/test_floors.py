"""Imports go down only; .importlinter says what down is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LINT = str(Path(sys.executable).with_name("lint-imports"))


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [LINT, "--config", str(root / ".importlinter"), "--no-cache"]
    environ = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, check=False)


def test_no_module_imports_upwards(root: Path) -> None:
    done = lint(root)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("hyperpod_ext/config/planted.py", "import hyperpod_ext.jobs.contract.handle"),
        ("hyperpod_ext/jobs/planted.py", "import hyperpod_ext.runtime"),
        ("hyperpod_ext/jobs/planted.py", "import hyperpod_ext.clusters.request"),
        ("hyperpod_ext/clusters/planted.py", "import hyperpod_ext.runtime"),
        ("hyperpod_ext/runtime/planted.py", "import jinja2"),
        ("cli/planted.py", "def later():\n    import torch"),
    ],
)
def test_a_planted_import_is_caught(root: Path, tmp_path: Path, module: str, forbidden: str) -> None:
    for package in ("hyperpod_ext", "cli"):
        files = [*(root / package).rglob("*.py")]
        for file in files:
            copy = tmp_path / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    (tmp_path / ".importlinter").write_bytes((root / ".importlinter").read_bytes())
    (tmp_path / module).write_text(forbidden + "\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout
    assert "planted" in done.stdout
