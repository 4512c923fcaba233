"""Randomised fault schedules: what is restored is bit for bit one committed step, the newest that the copies allow.

`HPX_SCHEDULE_SEED=17 pytest tests/faults/test_schedules.py` runs one schedule and prints what happened in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from schedules import schedule
from schedules.node import speed_up

ONE = os.environ.get("HPX_SCHEDULE_SEED")
several = pytest.mark.skipif(ONE is not None, reason="HPX_SCHEDULE_SEED asks for one schedule")
PROCESSES = 2
# a process that dies is a thread that ends with SystemExit
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.mark.skipif(ONE is None, reason="HPX_SCHEDULE_SEED says which")
def test_the_schedule_that_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    speed_up(monkeypatch.setattr)
    print("\n".join(schedule.run(int(str(ONE)))))


@several
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_schedules_of_faults_end_with_one_committed_step(first: int, monkeypatch: pytest.MonkeyPatch):
    speed_up(monkeypatch.setattr)
    for seed in range(first, first + 20):
        schedule.run(seed)


def run_many(first: int, count: int) -> None:
    """In processes of their own: each has its own interpreter lock."""
    each = count // PROCESSES
    command = [sys.executable, "-m", "schedules.schedule"]
    running = [
        subprocess.Popen(
            [*command, str(first + part * each), str(first + (part + 1) * each)],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in range(PROCESSES)
    ]
    told = [process.communicate()[0] for process in running]
    for text in told:
        print(text)
    assert not any(process.returncode for process in running), "run one of them alone with HPX_SCHEDULE_SEED"


@several
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_hundred_more_schedules():
    run_many(1_000, 100)


@several
@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_thousand_schedules():
    run_many(10_000, 10_000)
