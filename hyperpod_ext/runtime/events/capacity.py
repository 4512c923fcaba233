"""How many nodes a job had of those that it was made for: from the event log to the job's report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]


def capacity_of(events: Sequence[Event]) -> dict[str, float]:
    """`nodes` and `spares` as the job was made, and `missing_node_s`: node-seconds without lost nodes, and those in
    which all waited for another one. Nodes that were taken away by order are not missing."""
    started = next((event for event in events if event["event"] == "job_started"), {})
    nodes, now, missing = int(started.get("nodes", 0)), int(started.get("nodes", 0)), 0.0
    lost, waiting, since = 0, False, 0.0
    for event in events:
        kind = event["event"]
        if kind in ("resized", "awaiting_node", "generation"):
            missing += (now if waiting else lost) * max(0.0, event["t"] - since)
            since = event["t"]
        if kind == "resized":
            change, now = int(event["nodes"]) - int(event["of"]), int(event["nodes"])
            if event["cause"] == "lost" or (change > 0 and lost):
                lost = max(0, lost - change)
        elif kind in ("awaiting_node", "generation"):
            waiting = kind == "awaiting_node"
    if events:
        missing += (now if waiting else lost) * max(0.0, events[-1]["t"] - since)
    return {"nodes": nodes, "spares": int(started.get("spares", 0)), "missing_node_s": round(missing, 3)}
