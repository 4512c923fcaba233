"""How soon faults are noticed: one job, many injected faults of every kind; `python benchmarks/cpu/detection.py`.

Prints medians, in seconds: from the fault to its being seen, and to the end of the first new step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "faults"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from conftest import Job

KINDS = ("exception", "sigkill", "sigsegv", "oom", "hang,stop", "hang,deadlock", "hang,loop", "hang,gil")
APART = 25
"""Steps between two faults, so that none follows from another."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floor", type=float, default=1.0, help="restart.hang.floor_s")
    arguments = parser.parse_args()
    planned = {10 + APART * number: kind for number, kind in enumerate(KINDS * arguments.rounds)}
    faults = []
    for number, (step, kind) in enumerate(planned.items()):
        name, _, how = kind.partition(",")
        faults.append(f"{name}:rank={number % 4},step={step},phase=backward" + (f",how={how}" if how else ""))
    hang = {"floor_s": arguments.floor, "factor": 3.0, "first_step_s": 20.0, "heartbeat_s": 20.0}
    settings = {"restart": {"hang": hang, "max_restarts": 1000}}
    env = {"HPX_CHAOS": ";".join(faults), "HPX_TEST_STEPS": str(max(planned) + APART)}
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder) / "job", env=env, settings=settings).start()
        report = job.wait()
        events = [json.loads(line) for line in (job.folder / "events.jsonl").read_text().splitlines()]
    print(f"{report['state']}: {len(report['recoveries'])} of {len(faults)} faults, {report['steps_lost']} steps lost")
    for kind in KINDS:
        found = [r for r in report["recoveries"] if planned.get(r["fault"]["step"]) == kind]
        seen = statistics.median(r["phases"]["fault_seen"] for r in found)
        whole = statistics.median(r["seconds"] for r in found)
        told = ", ".join(sorted({r["fault"]["kind"] for r in found}))
        print(f"{kind:14} seen after {seen:.3f}, first new step after {whole:.3f}; told as {told}; {len(found)} times")
    hung, stacks = ([e for e in events if e["event"] == name] for name in ("hung", "stacks"))
    took = statistics.median(after["t"] - before["t"] for before, after in zip(hung, stacks, strict=True))
    print(f"stacks in the log: {sum(e['dumped'] for e in stacks)} of {len(hung)}, median {took:.3f}")


if __name__ == "__main__":
    main()
