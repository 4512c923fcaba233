"""A durable tier that is added in a copy of the package: one file, and its name in one import. A job saves to it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SHELF = '''
"""Checkpoints on a shelf: a directory that another program takes to the archive."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hyperpod_ext.config.checkpoint.tier import DurableTier


class ShelfTier(DurableTier):
    """A shelf."""

    schemes = ("shelf",)
    store = "hyperpod_ext.config.checkpoint.shelf:ShelfStore"
    distance = 8
    kind: Literal["shelf"] = "shelf"
    shelf: Annotated[str, Field(pattern="^shelf://", examples=["shelf:///archive"])]
    """Where it is."""

    @property
    def place(self) -> str:
        return self.shelf


def __getattr__(name: str) -> object:
    from hyperpod_ext.runtime.storage.file import FileStore

    class ShelfStore(FileStore):
        @classmethod
        def at(cls, place: str, job: str = "", **options: object) -> ShelfStore:
            store = cls(place.removeprefix("shelf://"), job)
            store.url = f"{place}/{job}".rstrip("/")
            return store

    if name == "ShelfStore":
        return ShelfStore
    raise AttributeError(name)
'''
RUN = "from hyperpod_ext.cli import main; main()"
JOB = """\
name: shelved
script: train.py
args: ["--steps", "6"]
global_batch_size: 8
checkpoint:
  tiers:
    - {kind: memory}
    - {kind: shelf, shelf: "shelf://%s", every_steps: 2}
"""


@pytest.fixture
def package(tmp_path: Path, root: Path) -> Path:
    """A copy of the package in which files may be added."""
    copy = tmp_path / "package"
    shutil.copytree(root / "hyperpod_ext", copy / "hyperpod_ext", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "cli", copy / "hyperpod_ext" / "cli", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def add_tier(package: Path) -> list[Path]:
    """Add the shelf; the files that were written."""
    folder = package / "hyperpod_ext/config/checkpoint"
    file, imports = folder / "shelf.py", folder / "__init__.py"
    file.write_text(SHELF.lstrip())
    before = imports.read_text()
    imports.write_text(re.sub(r"(import disk, file, s3)\b", r"\1, shelf", before))
    assert imports.read_text() != before
    return [file, imports]


def hp_ext(package: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(package), "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-c", RUN, *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_a_tier_is_one_file_and_one_import(package: Path, tmp_path: Path, root: Path) -> None:
    assert len(add_tier(package)) <= 4
    folder = tmp_path / "job"
    folder.mkdir()
    shutil.copy(root / "examples" / "01-local" / "train.py", folder)
    (folder / "job.yaml").write_text(JOB % (tmp_path / "archive"))
    for again in (False, True):
        done = hp_ext(package, folder, "create-job", "-f", "job.yaml", "--target", "local", "--wait")
        assert done.returncode == 0, done.stdout + done.stderr
        assert list((tmp_path / "archive" / "shelved").glob("step-000000006-*/manifest.json")), again
    report = hp_ext(package, folder, "report", "shelved", "-o", "json")
    assert '"shelf"' in report.stdout, report.stdout + report.stderr
    listed = hp_ext(package, folder, "checkpoints", "list", "-f", "job.yaml", "-o", "json")
    assert '"tier": "shelf"' in listed.stdout, listed.stdout + listed.stderr
    for target in ("hyperpod-eks", "kubeflow", "hyperpod-slurm", "sagemaker"):
        words = ("validate", "job.yaml", "--target", target, "--set", "image=repo/train:1")
        checked = hp_ext(package, folder, *words)
        assert "Traceback" not in checked.stderr
        assert "checkpoint.tiers" not in checked.stdout + checked.stderr, checked.stdout + checked.stderr
