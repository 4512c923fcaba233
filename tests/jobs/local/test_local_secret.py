"""The secret of a job that runs here: private from its first moment, and the same for every submission."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpod_ext.jobs.local.engine import _secret_of
from hyperpod_ext.jobs.local.store import Submission


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Nothing but the code itself keeps others out."""
    before = os.umask(0)
    yield
    os.umask(before)


def submission(root: Path, number: int) -> Submission:
    folder = root / "job" / str(number)
    folder.mkdir(parents=True)
    return Submission(folder)


def test_only_its_owner_may_read_it_and_it_is_long_enough(tmp_path: Path) -> None:
    file = _secret_of(submission(tmp_path, 1))
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(file.read_text()) >= 32


def test_all_submissions_of_a_name_have_one(tmp_path: Path) -> None:
    first = _secret_of(submission(tmp_path, 1))
    text = first.read_text()
    assert _secret_of(submission(tmp_path, 2)) == first
    assert first.read_text() == text
    assert [path.name for path in sorted(first.parent.rglob("*")) if path.is_file()] == ["secret"]
