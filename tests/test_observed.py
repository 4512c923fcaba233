"""Behaviour that others can observe is as recorded in tests/observed/. `make observed ARGS=--write` records changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from observed import errors_page, record, refusals

QUICK = ("examples", "specs", "wrong", "messages", "outputs", "options", "names", "errors")


@pytest.mark.parametrize("section", QUICK)
def test_the_quick_part_is_as_recorded(section: str) -> None:
    assert record.changed([section], fast=True) == []


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("section", record.SECTIONS)
def test_everything_is_as_recorded(section: str) -> None:
    assert record.changed([section]) == []


def test_the_page_of_errors_shows_the_record(golden: Callable[[Path, str], None], root: Path) -> None:
    golden(root / "docs" / "errors.md", errors_page.page())


def test_the_page_of_errors_has_at_least_300_provoked_ones_of_every_area_and_exit_code() -> None:
    found = record.recorded("errors")
    assert len(found) >= 300
    assert {key.partition(": ")[0] for key in found} == set(errors_page.AREAS)
    assert {one["code"] for one in found.values()} >= {0, 1, 2, 3, 4, 5, 6, 7}
    assert {*refusals.CODES.values()} <= {one["code"] for one in found.values()} | {8, 130}
