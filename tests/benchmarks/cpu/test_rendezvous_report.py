"""What the rendezvous benchmark concludes from what it measured, and one small run of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rendezvous_page import make_document, make_tables
from rendezvous_sides import OURS, SIDES, TORCH

SPENT = {"cpu": [0.002, 0.003], "queued": [0.15, 0.16]}


def _opened(side: str, size: int, **changes):
    slow = 10.0 if side == TORCH else 1.0
    return {
        "side": side, "size": size, "load": 1.0, "connect": 0.01, "first_init": slow, "reinit": [slow, slow, 9 * slow],
        "first_sum": [0.1, 0.1, 0.1], "destroy": [slow] * 4, "requests": [5] * size if side == OURS else [],
        "look_ups": 0 if side == OURS else -1, **changes,
    }  # fmt: skip


def _document(others: tuple[float, ...] = (0.02,), **changes):
    opened = [_opened(side, size, **(changes if side == OURS else {})) for side in SIDES for size in (4, 64)]
    freed = [{"size": size, "numel": 1, "neighbours": [-0.01, 0.002], "others": [*others], **SPENT} for size in (4, 64)]
    return make_document(opened, freed, 3.0, 3.0, "command")


def test_all_aims_met():
    document = _document()
    assert "64 ranks                                           2.5     155.0" in make_tables(document)
    assert all(document["aims"].values())
    assert document["medians"][OURS]["64"]["reinit"] == 1.0
    assert document["survivors"]["4"]["neighbours"]["median"] == pytest.approx(0.001)  # earlier than seen counts as 0
    assert "NOT met" not in make_tables(document)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"reinit": [3.0, 3.0, 3.0]}, "init again"),
        ({"first_sum": [0.2, 0.2, 0.2]}, "and all-reduce"),
        ({"destroy": [2.0] * 4}, "destroy"),
        ({"connect": 0.2}, "store ready"),
        ({"look_ups": 1}, "no name"),
        ({"requests": [9, 1, 1, 1]}, "no rank serves"),
        ({"others": (0.01, 0.01, 0.06)}, "every survivor"),
    ],
)
def test_an_aim_that_is_missed_is_named(changes, missed):
    document = _document(**changes)
    assert any(missed in aim for aim, met in document["aims"].items() if not met)
    assert "NOT met" in make_tables(document)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_small_run_measures_both_sides(tmp_path: Path):
    program = Path(__file__).parents[3] / "benchmarks" / "cpu" / "rendezvous.py"
    command = [sys.executable, str(program), "--rounds", "1", "--faults", "2", "--sizes", "4", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "survivors out" in done.stdout, done.stderr  # on a busy machine it may miss an aim, and say so
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {"rendezvous.json", "rendezvous-rounds.json", "rendezvous.md", "rendezvous.svg"}
