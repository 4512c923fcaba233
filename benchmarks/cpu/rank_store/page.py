"""What people and programs read of the store's benchmark: the document, the table, the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log2
from typing import Any

from recovery_page import describe_machine

PHASES = {
    "start_default": "start: default group, first all-reduce",
    "start_mesh": "start: groups of a mesh, an all-reduce in each",
    "lost_default": "lost node: default group again",
    "lost_mesh": "lost node: groups of the mesh again",
}
_RANK = {
    "requests": ("requests", 1, 2),
    "bytes": ("bytes", 1, 0),
    "lines": ("connections", 1, 2),
    "cpu_s": ("CPU, ms", 1e3, 2),
}
"""Columns of what a rank has on average: title, unit, digits."""
BUSIEST = 2.0
"""An aim: times the requests of an average rank that starts, or comes anew."""


def make_document(rows: Sequence[Mapping[str, Any]], workers: int, each: int, command: str) -> dict[str, Any]:
    """Everything that is known, as store.json has it."""
    starts = [_requests_at_start(row) for row in rows]
    busiest = [max(phase["busiest"] for phase in row["phases"].values()) for row in rows]
    aims = {
        "requests, bytes, connections and look-ups grow with N log N at most": all(
            _grows_slowly(rows, phase, what)
            for phase in PHASES
            for what in ("requests", "bytes", "lines", "worker_look_ups", "agent_look_ups", "look_up_bytes")
        ),
        f"no rank serves more than {BUSIEST:.0f} times an average rank's requests at the start": all(
            most <= BUSIEST * start for most, start in zip(busiest, starts, strict=True)
        ),
        "after a lost node, ranks that stay ask no more in a larger job": all(
            len({row["phases"][phase]["requests"] - own * row["ranks"] for row in rows}) == 1
            for phase, own in (("lost_default", 2), ("lost_mesh", 3))
        ),
    }
    return {
        "about": "key-value servers of all ranks, many ranks in a process, over loopback: sums over all ranks",
        "machine": describe_machine(),
        "command": command,
        "workers_per_node": workers,
        "ranks_per_process": each,
        "aims": aims,
        "rows": list(rows),
    }


def _requests_at_start(row: Mapping[str, Any]) -> float:
    phases = row["phases"]
    return float(max(phases[phase]["requests"] for phase in ("start_default", "start_mesh")) / row["ranks"])


def _grows_slowly(rows: Sequence[Mapping[str, Any]], phase: str, what: str) -> bool:
    each = [row["phases"][phase][what] / (row["ranks"] * log2(row["ranks"])) for row in rows]
    return all(after <= 1.05 * before for before, after in pairwise(each))


def make_table(document: Mapping[str, Any]) -> str:
    """A part for each phase, rows by number of ranks; then the aims."""
    lines = []
    nodes = document["workers_per_node"]
    titles = [*(title for title, _, _ in _RANK.values()), "busiest", "look-ups", "of agents", "bytes of these"]
    for phase, title in PHASES.items():
        lines += [title, f"{'ranks':>10}" + "".join(f"{name:>16}" for name in titles)]
        for row in document["rows"]:
            cost, ranks = row["phases"][phase], row["ranks"]
            cells = [f"{cost[name] / ranks * unit:.{digits}f}" for name, (_, unit, digits) in _RANK.items()]
            cells.append(f"{cost['busiest']:.0f}")
            cells += [f"{cost[name] / ranks * nodes:.2f}" for name in ("worker_look_ups", "agent_look_ups")]
            cells.append(f"{cost['look_up_bytes'] / ranks * nodes:.0f}")
            lines.append(f"{ranks:>10}" + "".join(f"{cell:>16}" for cell in cells))
        lines.append("")
    return "\n".join([*lines, *(f"{'met    ' if met else 'NOT met'} {aim}" for aim, met in document["aims"].items())])


def make_page(document: Mapping[str, Any]) -> str:
    """store.md."""
    machine = document["machine"]
    return f"""\
# The ranks' store by number of ranks

`make bench-store` writes this page and [store.json](store.json).

```
{make_table(document)}
```

Requests, bytes, connections and CPU are of an average rank, look-ups of an average node of
{document["workers_per_node"]} ranks. `tests/benchmarks/cpu/rank_store/test_counted.py` holds the counts at small sizes,
and that the benchmark asks what real groups ask.

## What is measured

The servers and stores that ranks have, {document["ranks_per_process"]} of them in a process, with a thread and a port
each, over the loopback interface. Torch and gloo are not there: each rank asks what a group of gloo asks of its store
when connections are made at their first use. It sets where it is reached. In its first all-reduce it waits for, and
gets, the same of its two neighbours in a ring. The mesh has three dimensions: ranks of a node, up to four stages, and
replicas.

- **start**: no rank knows any other.
- **lost node**: one node's ranks are other processes, at other addresses. All ranks open their groups again. The others
  watch their neighbours' keys: values of the new generation were sent to them when they were set.
- **requests** are counted where they are served, a rank's own included: two in the default group, three in the mesh.
  **busiest** is the rank that served most.
- **bytes** are those of TCP's payload on lines to a rank's server, handshakes included; **connections**, how many such
  lines there are. **CPU** is that of both ends.
- **look-ups** are what a node's workers ask their agent for addresses, **of agents** what the agent asks the
  coordinator, **bytes of these** those of the agent's and of the answers. In a job of up to 64 ranks all addresses are
  sent when a generation begins, and nothing is looked up.

Measured on {machine["cores"]} cores ({machine["cpu"]}), Python {machine["python"]}.

```
{document["command"]}
```

## Limits

- One machine: connections cost no round trip, and 16,384 ranks need as many threads (`kernel.pid_max` is 32,768 on
  many). Of each rank, about 20 files are open here.
- All ranks set their keys before any asks for one, as between a restore and the first step. A rank that is quicker than
  its neighbour asks it.
- Workers of a node look up one after the other. At the same moment, several may ask their agent for the same node; it
  asks the coordinator once.
- A barrier and other collectives meet more ranks than a ring does: gloo's barrier log2 N of them.
"""
