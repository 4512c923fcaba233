"""A job's start and a lost node, as the ranks' store sees them: the same for owners here and in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rank_store.owners import Owners
from rank_store.pattern import mesh_of

AskAll = Callable[..., list[Any]]
"""Has all owners' processes do what is named, at the same time; what each has returned."""
PHASES = ("start_default", "start_mesh", "lost_default", "lost_mesh")
_LARGEST = ("busiest",)


def measure(ask_all: AskAll, ranks: int, workers_per_node: int) -> dict[str, dict[str, float]]:
    """What each of `PHASES` costs: sums over all ranks, but for the busiest."""
    lost = ranks // 2 - ranks // 2 % workers_per_node
    found = {}
    for event, order in (("start", ("start",)), ("lost", ("lose", lost))):
        ask_all("begin", _merged(ask_all(*order)))
        ask_all("cost")
        ask_all("open")
        for which in ("default", "mesh"):
            ask_all("make", which)
            ask_all("sum", which)
            found[f"{event}_{which}"] = _together(ask_all("cost"))
    ask_all("close")
    return found


def _merged(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {rank: address for each in several for rank, address in each.items()}


def _together(costs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: (max if name in _LARGEST else sum)(cost[name] for cost in costs) for name in costs[0]}


def measure_here(ranks: int, workers_per_node: int) -> dict[str, dict[str, float]]:
    """With all owners in this process."""
    owners = Owners(0, ranks, ranks, workers_per_node, mesh_of(ranks, workers_per_node))
    return measure(lambda name, *arguments: [getattr(owners, name)(*arguments)], ranks, workers_per_node)


def measure_in_processes(ranks: int, each: int, workers_per_node: int) -> dict[str, dict[str, float]]:
    """With `each` owners a process."""
    program = Path(__file__).with_name("owners.py")
    processes = []
    try:
        for first in range(0, ranks, each):
            owners = {
                "first": first,
                "count": min(each, ranks - first),
                "world_size": ranks,
                "workers_per_node": workers_per_node,
                "mesh": mesh_of(ranks, workers_per_node),
            }
            command = [sys.executable, str(program), json.dumps(owners)]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return measure(lambda *order: _ask_all(processes, order), ranks, workers_per_node)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _ask_all(processes: Sequence[subprocess.Popen[str]], order: Sequence[Any]) -> list[Any]:
    line = json.dumps(order) + "\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(line)
        process.stdin.flush()
    answers = []
    for process in processes:
        assert process.stdout is not None
        if not (answer := process.stdout.readline()):
            raise SystemExit("a process of owners has ended; its last words are above")
        answers.append(json.loads(answer))
    return answers
