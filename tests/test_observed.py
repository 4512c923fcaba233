"""Behaviour that others can observe is as recorded in tests/observed/. `make observed ARGS=--write` records changes."""

from __future__ import annotations

import pytest
from observed import record

QUICK = ("examples", "specs", "wrong", "messages", "outputs", "options", "names")


@pytest.mark.parametrize("section", QUICK)
def test_the_quick_part_is_as_recorded(section: str) -> None:
    assert record.changed([section], fast=True) == []


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("section", record.SECTIONS)
def test_everything_is_as_recorded(section: str) -> None:
    assert record.changed([section]) == []
