"""One job, many random faults: it ends, bit for bit equal, and what outlives them all does not grow.

Any rank at any place or moment of a step is killed, or raises; now and then two at once, or all of a node. The last
rank only ever raises, so that a worker lives through as many as can be, beside the agents and memory servers.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from endurance import Watched, median, thirds

SCRIPT = Path(__file__).parent / "bitwise.py"
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "torch.utils.data"]
PLACES = ("data loading", "forward", "backward", "all-reduce", "optimizer", "checkpointing")
SEED = int(os.environ.get("HPX_SOAK_SEED", "0")) or random.SystemRandom().randrange(1 << 32)


def random_faults(chance: random.Random, count: int) -> tuple[list[dict[str, Any]], int]:
    """Faults, one every step or three; and the number of steps."""
    faults: list[dict[str, Any]] = []
    step = 2
    for _ in range(count):
        kind = chance.choice(["place", "place", "place", "moment", "two", "node"])
        ranks = {"two": chance.sample(range(3), 2), "node": [0, 1]}.get(kind, [chance.randrange(4)])
        how = "raise" if 3 in ranks or (kind == "place" and chance.random() < 0.4) else "kill"
        # how long a step takes, nobody knows here: most of these strike in it, some in the next
        place = round(chance.random() * 0.05, 4) if kind == "moment" and how == "kill" else chance.choice(PLACES)
        faults.append({"place": place, "how": how, "ranks": ranks, "step": step})
        step += chance.randrange(1, 4)
    return faults, step + 2


@pytest.mark.slow
@pytest.mark.thorough
def test_twenty_random_faults(job):
    endure(job, "ddp", 20)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "hsdp"])
def test_two_hundred_random_faults(job, parallel):
    endure(job, parallel, int(os.environ.get("HPX_SOAK_FAULTS", "200")))


def endure(job: Any, parallel: str, count: int) -> None:
    print(f"HPX_SOAK_SEED={SEED}")
    faults, steps = random_faults(random.Random(SEED), count)
    budgets = dict.fromkeys(("max_restarts", "max_in_process", "max_on_node"), 10 * count)
    # with leave_timeout_s as it is: a survivor that does not come free by itself costs half a minute, and is seen
    settings = {"restart": {"preload": PRELOAD, **budgets}}
    env = {"HPX_TEST_PARALLEL": parallel, "HPX_TEST_STEPS": str(steps)}
    undisturbed = job("undisturbed", script=SCRIPT, settings=settings, env=env).start().wait()
    running = job(
        "faults", script=SCRIPT, cold=True, settings=settings, env={**env, "HPX_TEST_FAULTS": json.dumps(faults)}
    )
    watched = Watched(running.start())
    report = watched.report
    assert report["state"] == "succeeded", report["error"]
    struck = {path.name.split("-")[1] for path in running.folder.glob("spent-*")}
    recoveries, seconds = report["recoveries"], report["seconds"]["wall"]
    print(f"{parallel}: {len(struck)} of {count} faults struck, {len(recoveries)} recoveries")
    print(f"{steps} steps in {seconds:.1f} s, {report['steps_lost']} of them lost")
    print(*watched.phase_rows(), *watched.rows(), sep="\n")
    assert report["losses"] == undisturbed["losses"]
    assert report["weights"] == undisturbed["weights"] != ""
    assert len(struck) >= 0.9 * count  # a moment may come after the process has died of another fault
    watched.assert_flat()
    stuck = [event for event in watched.events if event["event"] == "stuck"]
    assert not stuck, "survivors did not come free in time, and were replaced"
    if count >= 100:  # of fewer, what else the machine does meanwhile decides
        first, _, last = (median(one["seconds"] for one in some) for some in thirds(recoveries))
        assert last < 1.5 * first + 0.1, "a recovery takes longer the more there have been"
