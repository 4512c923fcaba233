"""The example, killed at a random rank, step and moment within the step, again and again."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

RUNS = int(os.environ.get("HPX_SOAK_RUNS", "20"))
SEED = int(os.environ.get("HPX_SOAK_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
STEPS = 20
EXAMPLE = Path(__file__).parents[2] / "examples/01-local/train.py"


def test_random_kills_cost_no_step_and_change_no_number(job):
    chance = random.Random(SEED)
    print(f"HPX_SOAK_SEED={SEED}")
    settings = {"global_batch_size": 16}
    undisturbed = job("undisturbed", script=EXAMPLE, args=["--steps", str(STEPS)], settings=settings).start().wait()
    step_s = undisturbed["seconds"]["steps"] / STEPS
    outcomes = []
    for number in range(RUNS):
        rank, step, delay_s = chance.randrange(4), chance.randrange(STEPS - 1), chance.random() * 1.2 * step_s
        running = job(f"run{number}", script=EXAMPLE, args=["--steps", str(STEPS)], settings=settings).start()
        pid = running.until("joined", rank=rank)["pid"]
        running.until("step" if step else "begun", step=step)
        threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL)).start()  # any moment of the step will do
        outcomes.append((rank, step, round(delay_s, 3), judge(undisturbed, running.wait())))
        print(outcomes[-1], flush=True)
    assert [outcome for outcome in outcomes if outcome[-1] != "equal"] == []


def judge(undisturbed: dict[str, Any], report: dict[str, Any]) -> str:
    """`equal`, or what is wrong with the run."""
    wrong = [name for name in ("losses", "weights", "metrics") if report[name] != undisturbed[name]]
    if report["state"] != "succeeded":
        return f"{report['state']}: {report['error']}"
    if len(report["recoveries"]) != 1 or not report["recoveries"][0]["survivor_pids_kept"]:
        return f"recoveries: {report['recoveries']}"
    if report["steps_lost"]:
        return f"{report['steps_lost']} steps lost"
    return f"not equal: {wrong}" if wrong else "equal"
