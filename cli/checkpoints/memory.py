"""Reads the snapshots in the memory tier of a running local job, from the memory server of each node."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output import columns
from .location import shown
from .table import age, ranks, size

if TYPE_CHECKING:
    from hyperpod_ext.jobs.local.store import Submission

_TIMEOUT_S = 5.0
_SHOWN = ("rank", "step", "generation", "state", "replica", "nbytes", "saved_at", "world_size")


def ask_memory(submission: Submission) -> dict[str, Any] | None:
    """Return the snapshots in the memory of each node. None if the job is not running, because its memory tier is then
    lost."""
    scratch = submission.read_status().get("scratch")
    if not submission.is_running() or scratch is None:
        return None
    return {"job": submission.name, "nodes": [_ask(node, Path(scratch)) for node in nodes_of(submission)]}


def nodes_of(submission: Submission) -> list[int]:
    """Return the numbers of the job's present nodes. Spares and replacements are included; lost nodes are not."""
    from ..job_events import nodes_in, read_events_of

    members = nodes_in(read_events_of(str(submission.folder))).members
    return sorted(members) or [*range(submission.read_job().nodes)]


def _ask(node: int, scratch: Path) -> dict[str, Any]:
    from hyperpod_ext.errors import HyperpodExtError
    from hyperpod_ext.runtime.ipc import messages as wire
    from hyperpod_ext.runtime.ipc.declared import encode, with_version
    from hyperpod_ext.runtime.memory_server.protocol.request import read_answer
    from hyperpod_ext.runtime.memory_server.protocol.requests import Status

    request = Status()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(str(scratch / f"node{node}.memory"))
            wire.send(connection, with_version(encode(request)))
            if (answer := wire.receive(connection)) is None:
                raise wire.WireError("the memory server closed the connection")
            status = read_answer(request, answer)
    except FileNotFoundError:
        problem = "its memory server is not up yet"
    except OSError as error:
        problem = f"its memory server does not answer: {error.strerror or error}"
    except HyperpodExtError as error:
        problem = error.message
    else:
        snapshots = [{key: snapshot.get(key) for key in _SHOWN} for snapshot in status.snapshots]
        found = {"node": node, "error": None, "snapshots": snapshots, "copying": list(status.copying)}
        return found | ({"pieces": list(status.pieces)} if status.pieces else {})
    return {"node": node, "error": problem, "snapshots": [], "copying": []}


def snapshot_rows(memory: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return one table row for each step with snapshots in memory: its ranks, and the states of their snapshots."""
    groups: dict[tuple[int, int, bool], list[Mapping[str, Any]]] = {}
    for node in memory["nodes"]:
        for one in node["snapshots"]:
            groups.setdefault((one["step"], one["generation"], one["replica"]), []).append(one)
    rows: list[tuple[str, ...]] = []
    for (step, generation, replica), group in sorted(groups.items(), key=lambda item: (*item[0][:2], not item[0][2]))[
        ::-1
    ]:
        nbytes = size(sum(one["nbytes"] for one in group))
        newest = age(time.time() - max(one["saved_at"] or 0 for one in group))
        tier = "peer" if replica else "memory"
        rows.append((str(step), str(generation), _held_by(group), nbytes, newest, tier, _states(group)))
    return rows + _piece_rows(memory)


def _piece_rows(memory: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return one table row for each step with parity data in memory. The row names the ranks of the parity data."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for node in memory["nodes"]:
        for one in node.get("pieces", ()):
            groups.setdefault((one["step"], one["generation"]), []).append(one)
    return [
        (str(step), str(generation), _held_by(group), size(sum(one["nbytes"] for one in group)), "-", "parity", "-")
        for (step, generation), group in sorted(groups.items(), reverse=True)
    ]


def _held_by(group: Sequence[Mapping[str, Any]]) -> str:
    return f"{len({one['rank'] for one in group})}/{group[0]['world_size'] or '?'}"


def _states(group: Sequence[Mapping[str, Any]]) -> str:
    by_state: dict[str, list[int]] = {}
    for one in group:
        by_state.setdefault(one["state"], []).append(one["rank"])
    if len(by_state) == 1:
        return next(iter(by_state))
    return ", ".join(f"{state} (rank {ranks(held)})" for state, held in by_state.items())


def copying_table(memory: Mapping[str, Any]) -> str:
    """Return a table with the progress of copies from memory to other tiers, one row for each node and tier. Empty if
    there are no copies."""
    rows: list[tuple[str, ...]] = [("NODE", "COPIES TO", "STEP", "SENT", "DONE", "SUPERSEDED", "SKIPPED", "FAILED")]
    problems = []
    for node in memory["nodes"]:
        for one in node["copying"]:
            step = one.get("durable_step", one.get("replicated_step"))
            done = one.get("done", one.get("copies"))
            counts = [done, *(one.get(key) for key in ("superseded", "skipped", "failed"))]
            known = ("-" if value is None else str(value) for value in (step, size(one["bytes_sent"]), *counts))
            rows.append((str(node["node"]), shown(str(one["tier"])), *known))
            if one["last_error"]:
                problems.append(f"node {node['node']}: {one['last_error']}")
        if node["error"]:
            problems.append(f"node {node['node']}: {node['error']}")
    parts = ([columns(rows)] if len(rows) > 1 else []) + problems
    return "\n".join(parts)
