"""Processes of a local job named `a`, by what they are there for."""

from __future__ import annotations

import json
from pathlib import Path

from local_place import LocalPlace
from waiting import until

from hyperpod_ext.processes import children, is_alive


def run_of(place: LocalPlace) -> Path:
    """Its run folder."""
    return place.home / "local" / "a" / "0001" / "main"


def agent_of(place: LocalPlace, node: int) -> int:
    """The agent of a node, which has the coordinator if that is node 0."""
    for pid in place.processes():
        command = _command(pid)
        if b"hyperpod_ext.runtime.agent" in command and command[command.index(b"--node-rank") + 1] == b"%d" % node:
            return pid
    raise AssertionError(f"node {node} has no agent")


def memory_server_of(place: LocalPlace, node: int) -> int:
    agent = agent_of(place, node)
    return until(lambda: _child_of(agent, b"hyperpod_ext.runtime.memory_server"), "it has no memory server")


def fork_server_of(place: LocalPlace, node: int) -> int:
    agent = agent_of(place, node)
    return until(lambda: _child_of(agent, b"hyperpod_ext.runtime.agent.fork_server"), "it has no fork server")


def rank_of(place: LocalPlace, rank: int) -> int:
    """The process of a rank that has begun with its script."""
    file = run_of(place) / "left.jsonl"

    def newest() -> int | None:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        begun = [json.loads(line) for line in lines if line.endswith("\n")]
        return next((each["pid"] for each in begun[::-1] if each["rank"] == rank and is_alive(each["pid"])), None)

    return until(newest, f"rank {rank} has no process")


def keeper_of(place: LocalPlace) -> int:
    return int((run_of(place).parent / "engine.pid").read_text())


def engine_of(place: LocalPlace) -> int:
    (pid,) = children(keeper_of(place))
    return pid


def _child_of(parent: int, module: bytes) -> int | None:
    """The oldest one that runs the module; those that were forked from it look the same."""
    found = [pid for pid in children(parent) if module in _command(pid)]
    return min(found, key=_began, default=None)


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _began(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
