"""How long healthy ranks pause when one of four is killed: `restart.policy: continue` beside `wait`.

`python benchmarks/cpu/continuing.py`, or `make bench-continue`. A pause is the longest time of a healthy rank from the
end of its last committed step to the beginning of its next one, with its work on the step that the fault cut short.
The ratio is to the median step of the same job. Ranks sleep through most of a step: a fault's
costs are shown, not how long a machine with few cores computes for four ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MOST_STEPS = 1.2
Events = list[dict[str, Any]]


def pauses(events: Events) -> list[tuple[str, int, float]]:
    """Of each time that all ranks left a generation: why, ranks after it, and the longest pause.

    A rank that stays may have another number in its last events than before. So a pause is taken from the first rank's
    end of the last step that counts to the last rank's beginning of the next: no rank has paused longer.
    """
    steps = [event for event in events if event["event"] == "step"]
    found = []
    for begun in [event for event in events if event["event"] == "generation" and event["generation"] > 1]:
        number = begun["generation"]
        cause = next((e["cause"] for e in events if e["event"] == "world" and e["generation"] == number), "wait")
        before = [e["t"] for e in steps if e["generation"] < number and e["step"] == begun["step"]]
        after = [e["began"] for e in steps if e["generation"] == number and e["step"] == begun["step"] + 1]
        found.append((cause, begun["world_size"], max(after) - min(before)))
    return found


def run(policy: str, folder: Path, seconds: float, at: float) -> tuple[float, list[tuple[str, int, float]]]:
    """The ordinary step of a job, and its pauses. `at`: how much of a step is over when the rank is killed."""
    from conftest import Job
    from event_log import events_in

    env = {"HPX_BENCH_SECONDS": str(seconds)}
    settings = {"global_batch_size": 24, "restart": {"policy": policy, "preload": ["torch", "torch._dynamo"]}}
    job = Job(
        folder, nodes=1, workers_per_node=4, script=HERE / "continue_train.py", settings=settings, env=env
    ).start()
    job.until("step", step=5, rank=2)
    time.sleep(at * seconds)
    pids = {event["rank"]: event["pid"] for event in events_in(folder / "events.jsonl") if event["event"] == "joined"}
    os.kill(pids[2], signal.SIGKILL)
    report = job.wait()
    assert report["state"] == "succeeded", report["error"]
    events = events_in(folder / "events.jsonl")
    made = [e["t"] - e["began"] for e in events if e["event"] == "step" and e["rank"] == 0 and 2 <= e["step"] <= 5]
    return statistics.median(made), pauses(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a step")
    parser.add_argument("--at", type=float, nargs="+", default=[0.1, 0.5, 0.9], help="shares of a step, for the kill")
    arguments = parser.parse_args()
    sys.path[:0] = [str(HERE.parents[1] / "tests" / "faults"), str(HERE.parents[1] / "tests" / "support")]
    print(f"{'policy':10}{'killed at':>10}{'step':>8}{'cause':>12}{'ranks':>7}{'pause':>9}{'ratio':>8}", flush=True)
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="hpx-") as scratch:
        for at in arguments.at:
            for policy in ("wait", "continue"):
                step, found = run(policy, Path(scratch) / f"{policy}-{at}", arguments.seconds, at)
                for cause, ranks, pause in found:
                    head = f"{policy:10}{at:>10.0%}{step:>7.2f}s{cause:>12}{ranks:>7}"
                    print(f"{head}{pause:>8.3f}s{pause / step:>8.2f}", flush=True)
                    worst = max(worst, pause / step) if policy == "continue" else worst
    print(f"longest pause with `continue`: {worst:.2f} steps; load of this machine {os.getloadavg()[0]:.1f}")
    if worst > MOST_STEPS:
        sys.exit(f"a pause above {MOST_STEPS} steps")


if __name__ == "__main__":
    main()
