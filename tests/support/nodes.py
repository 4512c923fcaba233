"""Nodes of a job that runs: how one is lost, and what its job tells of it so far."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from pathlib import Path
from typing import Any

from hyperpod_ext.jobs.contract.run_files import Tail
from hyperpod_ext.processes import descendants


def kill_node(running: Any, node: int) -> None:
    """SIGKILL to every process of a node, its agent first."""
    agent = running.agents[node]
    for pid in (agent.pid, *descendants(agent.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def socket_of(job: Any, node: int) -> Path:
    return Path(job.env["HPX_SOCKET_DIR"]) / f"node{node}.memory"


def memory_pid(job: Any, node: int) -> int:
    """Process id of a node's memory server."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(socket_of(job, node)))
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[0])


def events(running: Any, kind: str) -> list[dict[str, Any]]:
    """Those of a kind that are in the log by now."""
    return events_in(running.folder / "events.jsonl", kind)


def events_in(file: Path, kind: str) -> list[dict[str, Any]]:
    """Those of a kind that are in that log by now; its last line may be half written."""
    return [entry for entry in map(json.loads, Tail(file).lines()) if entry["event"] == kind]
