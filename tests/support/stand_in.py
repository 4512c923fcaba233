"""Shell that stands in for a node: what the engine sees of the real agent, without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hyperpod_ext.config.job import JobConfig
from hyperpod_ext.launch.plan import Plan, make_plan

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
    event = json.dumps({"t": 1.0, "event": "step", "rank": 0, "step": 1, "of": 2, "loss": 5.5})
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
