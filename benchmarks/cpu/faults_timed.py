"""How long a fault takes with about 75 MB of state a rank: `python benchmarks/cpu/faults_timed.py --fault node`.

Each round is a job of 4 ranks on 2 nodes (and, for `node`, a spare). A rank raises (`exception`) or is killed (`kill`),
or all processes of a node are killed from outside (`node`); what counts is the time from the fault to the end of the
first new step, less one ordinary step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hyperpod_ext.processes import descendants

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", choices=("exception", "kill", "node"), nargs="+", default=["node"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--node", type=int, default=1, help="node that is lost; 0 is the one that coordinates")
    parser.add_argument("--width", type=int, default=330_000, help="of the model; the state has 228 bytes for each")
    arguments = parser.parse_args()
    took: dict[str, list[float]] = {fault: [] for fault in arguments.fault}
    for number in range(arguments.rounds):
        for fault in arguments.fault:
            with tempfile.TemporaryDirectory(prefix="hpx-fault-") as folder:
                one = _round(Path(folder) / "job", fault, arguments.node, arguments.width)
            took[fault].append(one["seconds"])
            sys.stdout.write(f"{fault}, round {number + 1}: {json.dumps(one)}\n")
            sys.stdout.flush()
    for fault, seconds in took.items():
        middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
        sys.stdout.write(f"{fault}: median of {len(seconds)}: {middle:.3f} s, {least:.3f} to {most:.3f}\n")


def _round(folder: Path, fault: str, node: int, width: int) -> dict[str, Any]:
    env = {"HPX_TEST_NORM": "LayerNorm", "HPX_TEST_STEPS": "30", "HPX_TEST_WIDTH": str(width)}
    if fault != "node":
        kind = {"exception": "exception", "kill": "sigkill"}[fault]
        env["HPX_CHAOS"] = f"{kind}:rank=2,step=13,phase=backward"
    running = _job_class()(folder, spares=int(fault == "node"), env=env).start()
    try:
        struck = _lose_node(running, node) if fault == "node" else None
        report = running.wait()
    finally:
        running.stop()
    assert report["state"] == "succeeded", report["error"]
    (recovery,) = report["recoveries"]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    new = recovery["resumed_step"] + 1
    ended = max(step["t"] for step in steps if step["step"] == new and step["generation"] == recovery["generation"])
    if struck is None:
        (struck,) = (event["t"] for event in events if event["event"] == "injected")
    ordinary = statistics.median(step["t"] - step["began"] for step in steps if 5 <= step["step"] < new)
    return {
        "seconds": round(ended - struck - ordinary, 3),
        "ordinary_step": round(ordinary, 3),
        "steps_lost": report["steps_lost"],
        "phases": recovery["phases"],
    }


def _lose_node(running: Any, node: int) -> float:
    """Kill every process of a node in the midst of training; when."""
    running.until("imported", node=2)
    running.until("step", step=12)
    agent = running.agents[node]
    victims = (agent.pid, *descendants(agent.pid))
    killed = time.monotonic()
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return killed


def _job_class() -> Any:
    path = HERE.parents[1] / "tests" / "faults" / "conftest.py"
    spec = importlib.util.spec_from_file_location("faults_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Job


if __name__ == "__main__":
    main()
