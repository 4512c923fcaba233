"""Nodes of a job that runs: how one is lost, and what its job tells of it so far."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from hyperpod_ext.processes import descendants


def kill_node(running: Any, node: int) -> None:
    """SIGKILL to every process of a node, its agent first."""
    agent = running.agents[node]
    for pid in (agent.pid, *descendants(agent.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def events(running: Any, kind: str) -> list[dict[str, Any]]:
    """Those of a kind that are in the log by now."""
    lines = (running.folder / "events.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == kind]
