"""What a membership does, line by line: see `scenarios/`. `pytest --update-golden` writes the actions that follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from membership_job import play

SCENARIOS = Path(__file__).parent / "scenarios"


@pytest.mark.parametrize("name", sorted(file.stem for file in SCENARIOS.glob("*.txt")))
def test_each_line_is_followed_by_its_actions(name: str, golden: Callable[[Path, str], None]) -> None:
    file = SCENARIOS / f"{name}.txt"
    golden(file, play(file.read_text()))
