"""Shell that stands in for a node: what the engine sees of the real agent, without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.plan import Plan, make_plan

REPORT = {
    "state": "succeeded",
    "error": None,
    "world_size": 2,
    "generations": 1,
    "steps": 2,
    "steps_lost": 0,
    "goodput": 0.5,
    "seconds": {"startup": 0.5, "steps": 1.0, "recovery": 0.0, "other": 0.5, "wall": 2.0},
    "recoveries": [],
    "losses": {"1": 5.5, "2": 5.25},
    "metrics": {"held_out_loss": 3.0},
    "weights": "abc",
}

SLEEPING = "sleep 600 & setsid sleep 600 & sleep 600\n"
"""A node with a child, an orphan in a session of its own, and no wish to end."""


def reporting(**changes: object) -> str:
    """A node that reports success, with `changes`."""
    report = json.dumps(REPORT | changes)
    step = {"rank": 0, "generation": 1, "step": 1, "of": 2, "began": 0.5, "loss": 5.5}
    event = json.dumps({"t": 1.0, "event": "step"} | step)
    return (
        "mkdir -p $HPX_RUN_DIR/logs\n"
        "echo worker speaks > $HPX_RUN_DIR/logs/rank$HPX_NODE_RANK.log\n"
        f"[ $HPX_NODE_RANK = 0 ] || exit 0\necho '{event}' >> $HPX_RUN_DIR/events.jsonl\n"
        f"echo '{report}' > $HPX_RUN_DIR/report.json\n"
    )


def plan_of(script: str, **fields: object) -> Plan:
    """A plan of two nodes that each run `script`."""
    spec = {"name": "a", "script": "train.py", "nodes": 2} | fields
    plan = make_plan(JobConfig.model_validate_json(json.dumps(spec)), source_dir=Path("/"))
    return replace(plan, files={"node.sh": script})


AGENT = """\
import json, os, subprocess, sys, time
from pathlib import Path

run = Path(os.environ["HPX_RUN_DIR"])
node = os.environ["HPX_NODE_RANK"]
wish = sys.argv[-1]
(run / "logs").mkdir(parents=True, exist_ok=True)
(run / "logs" / f"rank{node}.log").write_text(f"worker {node} speaks\\n")
if wish == "sleep":
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(600)
if node == "0":
    events = [{"event": "job_started", "world_size": 2, "nodes": 2, "spares": 0}]
    made = {"event": "step", "rank": 0, "generation": 1, "of": 2, "began": 0.0, "loss": 5.0}
    events += [made | {"step": step} for step in (1, 2)]
    faulty = os.environ.get("HPX_CHAOS") != "off"
    if faulty:
        events[2:2] = [
            {"event": "fault", "rank": 1, "node": 1, "step": 2, "cause": "killed by SIGKILL (9)", "died": True},
            {"event": "go", "step": 1},
        ]
    with (run / "events.jsonl").open("a") as log:
        for event in events:
            log.write(json.dumps({"t": time.monotonic()} | event) + "\\n")
            log.flush()
            time.sleep(0.05)
    report = json.loads(REPORT) | ({"recoveries": [json.loads(RECOVERY)], "generations": 2} if faulty else {})
    if wish == "fail":
        report |= {"state": "failed", "error": {"code": "X", "message": "the script raised", "hint": "mend it"}}
    (run / "report.json").write_text(json.dumps(report))
sys.exit(7 if wish == "fail" else 0)
"""

RECOVERY = {
    "generation": 2,
    "fault": {"rank": 1, "node": 1, "step": 2, "cause": "killed by SIGKILL (9)"},
    "resumed_step": 1,
    "steps_lost": 0,
    "source": "live peer rank 0",
    "survivor_pids_kept": True,
    "phases": {
        "fault_seen": 0.004,
        "survivors_freed": 0.01,
        "new_member": 0.1,
        "state_back": 0.02,
        "first_new_step": None,
    },
    "seconds": 0.2,
}


def write_job(folder: Path, wish: str = "ok", more: str = "") -> Path:
    """A spec of two nodes whose agent is a stand-in that does as `wish` says: ok, fail or sleep.

    `python -m` looks into the folder of the script first, and finds the stand-in there.
    """
    agent = folder / "hyperpod_ext" / "runtime" / "agent.py"
    agent.parent.mkdir(parents=True)
    agent.write_text(f"REPORT = {json.dumps(REPORT)!r}\nRECOVERY = {json.dumps(RECOVERY)!r}\n{AGENT}")
    (folder / "train.py").touch()
    spec = folder / "job.yaml"
    spec.write_text(f"name: a\nscript: train.py\nargs: [{wish}]\nnodes: 2\n{more}")
    return spec
