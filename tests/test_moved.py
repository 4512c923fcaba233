"""Documented modules that have moved are found by their old names, too, which say so."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpod_ext._moved import MOVED
from hyperpod_ext.submit.import_any import import_file

EACH = """
import importlib, sys, warnings
from hyperpod_ext._moved import MOVED
warnings.simplefilter("always")
for old, new in MOVED.items():
    with warnings.catch_warnings(record=True) as said:
        found = importlib.import_module(old)
    assert found is importlib.import_module(new), old
    assert f"{old} has moved: import {new} instead" in str(said[0].message), old
    assert (found.__name__, found.__spec__.name) == (new, new), old
print(len(MOVED))
"""


def test_an_old_name_gives_the_same_module_and_warns() -> None:
    """In a process of its own: what it imports anew would take the place of what other tests have imported."""
    done = subprocess.run([sys.executable, "-c", EACH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(MOVED)


def test_an_old_name_can_be_run_as_before() -> None:
    command = [sys.executable, "-m", "hyperpod_ext.runtime.printed", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[args]`: run one" in done.stdout


def test_that_they_can_be_found_loads_next_to_nothing(root: Path) -> None:
    code = "import sys, hyperpod_ext; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & {"importlib.abc", "importlib.util", "inspect", "typing"} == set()


@pytest.mark.parametrize(
    "file",
    [
        "06-kubeflow/rendered/job-trainjob/job.yaml",
        "06-kubeflow/rendered/job-pytorchjob/job.yaml",
        "07-sagemaker/rendered/sagemaker/create_training_job.json",
    ],
)
def test_a_job_that_was_written_with_old_names_is_read_back_as_one_of_today(file: str, root: Path) -> None:
    text = (root / "examples" / file).read_text()
    before = text
    for old, new in MOVED.items():
        before = before.replace(new, old)
    assert before != text
    assert import_file(before, file) == import_file(text, file)
    assert import_file(before, file).left_out == []


def test_what_never_was_is_still_not_there() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hyperpod_ext.launch.nothing")
