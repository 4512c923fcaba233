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

Requests, bytes, connections and CPU are averages per rank. Look-ups are averages per node of
{document["workers_per_node"]} ranks. `tests/benchmarks/cpu/rank_store/test_counted.py` tests the counts in small jobs,
and tests that the benchmark sends the same requests as real process groups.

## What is measured

The benchmark runs each rank's key-value server and its client (the store), with {document["ranks_per_process"]} ranks
per process and a thread and a port for each rank, over the loopback interface. The benchmark does not run torch and
gloo: each rank itself sends the requests that a process group of gloo with lazy connections sends to its store. Each
rank sets its own address. In its first all-reduce, each rank waits for the addresses of its two neighbours in a ring,
and reads these addresses. The mesh has three dimensions: the ranks of a node, up to four stages, and replicas.

- **start**: no rank has the address of another rank yet.
- **lost node**: one node's ranks are new processes, at new addresses. All ranks create their process groups again.
  Ranks that were not lost watch the keys of their neighbours, and receive a new value as soon as a neighbour sets the
  value.
- **requests** are counted at the server. The requests include two in the default group, and three in the mesh, that a
  rank sends to itself. **busiest** is the number of requests at the rank's server that received the most requests.
- **bytes** is the TCP payload on connections to a rank's server, handshakes included. **connections** is the number of
  connections to a rank's server. **CPU** is the processor time of client and server together.
- **look-ups** is the number of requests for addresses that a node's workers send to their agent. **of agents** is the
  number of requests for addresses that the agent sends to the coordinator. **bytes of these** is the number of bytes of
  the agent's requests and of their answers. In a job of up to 64 ranks, all addresses are sent when a generation
  begins, so there are no look-ups.

Measured on {machine["cores"]} cores ({machine["cpu"]}), Python {machine["python"]}.

```
{document["command"]}
```

## Limits

- On one machine, connections cost no network round trip. 16,384 ranks need 16,384 threads; many machines allow at most
  32,768 (`kernel.pid_max`). Each rank has about 20 open files.
- All ranks set their keys before any rank reads one, as between a restore and the first step. In a real job, a rank
  that is faster than its neighbour has to wait for the neighbour's key, with one more request.
- In the benchmark, workers of a node look up addresses one after another. In a real job, several workers may request
  the same address from their agent at the same moment. The agent then sends one request to the coordinator.
- The benchmark measures only all-reduce in a ring. Other collectives connect to more ranks: gloo's barrier, for
  example, connects to log2 N ranks.
"""
