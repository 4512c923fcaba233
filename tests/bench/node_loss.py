"""How long the loss of a whole node takes: `python tests/bench/node_loss.py [--rounds 10] [--node 1] [--width 330000]`.

Each round is a job of 4 ranks on 2 nodes and a spare. All processes of a node are killed from outside; what counts
is the time from the first kill to the end of the first new step, less one ordinary step.
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
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--node", type=int, default=1, help="node that is lost; 0 is the one that coordinates")
    parser.add_argument("--width", type=int, default=330_000, help="of the model; the state has 228 bytes for each")
    arguments = parser.parse_args()
    took = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="hpx-node-loss-") as folder:
            one = _round(Path(folder) / "job", arguments.node, arguments.width)
        took.append(one["seconds"])
        sys.stdout.write(f"round {number + 1}: {json.dumps(one)}\n")
        sys.stdout.flush()
    least, most = min(took), max(took)
    sys.stdout.write(f"median of {len(took)}: {statistics.median(took):.3f} s, {least:.3f} to {most:.3f}\n")


def _round(folder: Path, node: int, width: int) -> dict[str, Any]:
    env = {"HPX_TEST_NORM": "LayerNorm", "HPX_TEST_STEPS": "30", "HPX_TEST_WIDTH": str(width)}
    running = _job_class()(folder, spares=1, env=env).start()
    try:
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
        report = running.wait()
    finally:
        running.stop()
    assert report["state"] == "succeeded", report["error"]
    (recovery,) = report["recoveries"]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    new = recovery["resumed_step"] + 1
    ended = max(step["t"] for step in steps if step["step"] == new and step["generation"] == recovery["generation"])
    ordinary = statistics.median(step["t"] - step["began"] for step in steps if 5 <= step["step"] < new)
    return {
        "seconds": round(ended - killed - ordinary, 3),
        "ordinary_step": round(ordinary, 3),
        "steps_lost": report["steps_lost"],
        "phases": recovery["phases"],
    }


def _job_class() -> Any:
    path = HERE.parent / "faults" / "conftest.py"
    spec = importlib.util.spec_from_file_location("faults_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Job


if __name__ == "__main__":
    main()
