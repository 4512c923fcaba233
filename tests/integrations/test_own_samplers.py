"""Trainers that choose their samples themselves, with the real libraries: groups and pairs stay whole, and two kills
change no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_twice import run_killed, written

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("kind", ["groups", "reused", "leave-one-out"])
def test_completions_are_compared_with_others_of_the_same_prompt(tmp_path: Path, kind: str) -> None:
    run_killed(tmp_path, "own_samplers.py", kind, batch=8, kills=("rank=1@step=7", "rank=0@step=12"))
    assert (seen := written(tmp_path))
    assert all(prompts[::2] == prompts[1::2] for prompts in seen), "neighbours have one prompt"
    assert len({each for prompts in seen for each in prompts}) > 4


@pytest.mark.parametrize(("kind", "batch"), [("preferences", 8), ("pairs", 8), ("noisy", 16), ("by-length", 8)])
def test_samplers_of_all_kinds_go_on_where_they_were(tmp_path: Path, kind: str, batch: int) -> None:
    """KTO; batches without a text twice, of two datasets; weighted, with epochs that end with a smaller step."""
    run_killed(tmp_path, "own_samplers.py", kind, batch=batch, kills=("rank=1@step=5", "rank=0@step=9"))


def test_groups_are_those_that_trl_makes_alone(tmp_path: Path) -> None:
    run_killed(tmp_path, "own_samplers.py", "as-alone", batch=8)
    equal = [each["equal"] for each in written(tmp_path) if isinstance(each, dict)]
    assert set(equal) == {64}, "of 64 batches, on each rank, at the start and after each kill"
    assert len(equal) >= 6


@pytest.mark.parametrize(("kind", "steps"), [("average", 18), ("stops-early", 14), ("own", 18)])
def test_callbacks_of_lightning_remember(tmp_path: Path, kind: str, steps: int) -> None:
    report = run_killed(tmp_path, "callbacks.py", kind, batch=8, kills=("rank=1@step=11",))
    assert max(map(int, report["losses"])) == steps
