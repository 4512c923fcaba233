"""What people and programs read of the control plane's benchmark: the document, the table, the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recovery_page import describe_machine

BEFORE: tuple[dict[str, Any], ...] = (
    {
        "nodes": 16,
        "ranks": 128,
        "start_cpu_s": 0.0251,
        "fault_cpu_s": 0.0401,
        "fault_bytes": 1069436,
        "fault_messages": 440,
        "rss_bytes": 49012736,
        "start_s": 0.029,
        "fault_s": 0.0387,
        "start_bytes": 509468,
        "step_cpu_s": 0.0117,
    },
    {
        "nodes": 64,
        "ranks": 512,
        "start_cpu_s": 0.0613,
        "fault_cpu_s": 0.1434,
        "fault_bytes": 9356492,
        "fault_messages": 1736,
        "rss_bytes": 52297728,
        "start_s": 0.0683,
        "fault_s": 0.1433,
        "start_bytes": 6891692,
        "step_cpu_s": 0.0331,
    },
    {
        "nodes": 128,
        "ranks": 1024,
        "start_cpu_s": 0.1273,
        "fault_cpu_s": 0.3023,
        "fault_bytes": 32208580,
        "fault_messages": 3464,
        "rss_bytes": 55513088,
        "start_s": 0.1469,
        "fault_s": 0.3239,
        "start_bytes": 26953312,
        "step_cpu_s": 0.0637,
    },
    {
        "nodes": 256,
        "ranks": 2048,
        "start_cpu_s": 0.2825,
        "fault_cpu_s": 0.6379,
        "fault_bytes": 120727876,
        "fault_messages": 6920,
        "rss_bytes": 62160896,
        "start_s": 0.3833,
        "fault_s": 0.663,
        "start_bytes": 109113547,
        "step_cpu_s": 0.124,
    },
    {
        "nodes": 512,
        "ranks": 4096,
        "start_cpu_s": 0.7641,
        "fault_cpu_s": 1.4209,
        "fault_bytes": 465817668,
        "fault_messages": 13832,
        "rss_bytes": 74612736,
        "start_s": 0.9191,
        "fault_s": 1.4673,
        "start_bytes": 438346279,
        "step_cpu_s": 0.2497,
    },
    {
        "nodes": 1024,
        "ranks": 8192,
        "start_cpu_s": 2.541,
        "fault_cpu_s": 3.5934,
        "fault_bytes": 1829910788,
        "fault_messages": 27656,
        "rss_bytes": 105967616,
        "start_s": 2.8689,
        "fault_s": 3.8418,
        "start_bytes": 1758139805,
        "step_cpu_s": 0.5369,
    },
    {
        "nodes": 2048,
        "ranks": 16384,
        "start_cpu_s": 10.2521,
        "fault_cpu_s": 10.9838,
        "fault_bytes": 7409289260,
        "fault_messages": 55304,
        "rss_bytes": 360611840,
        "start_s": 13.5837,
        "fault_s": 12.7005,
        "start_bytes": 7198151386,
        "step_cpu_s": 1.1532,
    },
)
"""The same rows of the control plane that sent the whole job state to every agent at every change."""
FAULT_CPU_S, FAULT_BYTES, START_CPU_S, RSS_BYTES, AT = 0.5, 64_000_000, 10.0, 300_000_000, 2048
"""The aims, at this number of nodes."""
COLUMNS = {
    "nodes": ("nodes", 1, 0),
    "ranks": ("ranks", 1, 0),
    "start_cpu_s": ("start, CPU s", 1, 2),
    "start_bytes": ("start, MB", 1e6, 1),
    "step_cpu_s": ("step, CPU s", 1, 2),
    "step_log_bytes": ("step, log KB", 1e3, 1),
    "fault_cpu_s": ("fault, CPU s", 1, 3),
    "fault_bytes": ("fault, MB", 1e6, 2),
    "fault_messages": ("fault, messages", 1, 0),
    "fault_s": ("fault, s", 1, 2),
    "fault_log_bytes": ("fault, log KB", 1e3, 1),
    "takeover_cpu_s": ("takeover, CPU s", 1, 2),
    "takeover_bytes": ("takeover, MB", 1e6, 2),
    "takeover_s": ("takeover, s", 1, 2),
    "rss_bytes": ("memory, MB", 1e6, 0),
}


def make_document(rows: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """Everything that is known, as control-plane.json has it."""
    aims = {}
    if (largest := next((row for row in rows if row["nodes"] == AT), None)) is not None:
        aims = {
            f"a lost node at {AT} nodes: at most {FAULT_CPU_S} s of CPU": largest["fault_cpu_s"] <= FAULT_CPU_S,
            f"and {FAULT_BYTES / 1e6:.0f} MB": largest["fault_bytes"] <= FAULT_BYTES,
            f"a start: at most {START_CPU_S:.0f} s of CPU": largest["start_cpu_s"] <= START_CPU_S,
            f"memory: at most {RSS_BYTES / 1e6:.0f} MB": largest["rss_bytes"] <= RSS_BYTES,
        }
    return {
        "about": "one coordinator and agents that are only their messages, over loopback; costs of the coordinator",
        "machine": describe_machine(),
        "command": command,
        "aims": aims,
        "rows": list(rows),
        "before": list(BEFORE),
    }


def make_table(document: Mapping[str, Any]) -> str:
    """Rows by number of nodes, those of before among them, then the aims."""
    lines = ["".join(f"{title:>17}" for title, _, _ in COLUMNS.values())]
    lines += [_line(row) for row in document["rows"]]
    if document["before"]:
        lines += ["", "before: the whole job state to every agent at every change", *map(_line, document["before"])]
    met = [f"{'met    ' if met else 'NOT met'} {aim}" for aim, met in document["aims"].items()]
    return "\n".join([*lines, *([""] if met else []), *met])


def _line(row: Mapping[str, Any]) -> str:
    cells = []
    for name, (_, unit, digits) in COLUMNS.items():
        cells.append(f"{row[name] / unit:>17.{digits}f}" if name in row else f"{'':>17}")
    return "".join(cells)


def make_kinds(document: Mapping[str, Any], what: str) -> str:
    """A table of what goes over the wire in a fault (`fault_by_kind`) or a start, by kind and number of nodes."""
    rows = document["rows"]
    kinds = sorted({kind for row in rows for kind in row[what]}, key=lambda kind: -rows[-1][what].get(kind, [0, 0])[1])
    lines = [
        "| message | " + " | ".join(f"{row['nodes']} nodes" for row in rows) + " |",
        "| --- |" + " ---: |" * len(rows),
    ]
    for kind in kinds:
        found = [row[what].get(kind, [0, 0]) for row in rows]
        lines.append(f"| `{kind}` | " + " | ".join(f"{count:,}, {nbytes:,} B" for count, nbytes in found) + " |")
    return "\n".join(lines)


def make_page(document: Mapping[str, Any]) -> str:
    """control-plane.md."""
    machine = document["machine"]
    return f"""\
# The control plane by number of nodes

`make bench-control-plane` writes this page and [control-plane.json](control-plane.json).

```
{make_table(document)}
```

## What each message costs

This table has the number of messages and bytes that the coordinator sends and receives when a node is lost.
[protocol.md](../protocol.md) describes each message. `tests/benchmarks/cpu/control_plane/test_counted.py` tests that
the numbers of messages and bytes grow at most with N log N.

{make_kinds(document, "fault_by_kind")}

This table has the number of messages and bytes when the job starts:

{make_kinds(document, "start_by_kind")}

This table has the number of messages and bytes when all agents connect to a new coordinator:

{make_kinds(document, "takeover_by_kind")}

## What is measured

The benchmark runs a job's coordinator in its own process. Another process sends the messages of all agents over the
loopback interface. The simulated job has eight workers per node and one spare. All agents connect at the same time.

- **start** lasts from the first connection until every agent has received the message to begin with step 0.
- **step**: every rank reports the beginning of its training loop, and one step. The event log contains the beginning
  of every rank's loop, and the steps [of some ranks](../events.md#what-a-line-has). **log KB** is the growth of the
  event log.
- **fault**: the connection of a node with eight ranks ends, and the spare gets these ranks. Every other rank still has
  its live state. Every node reports two snapshots in memory for each of its ranks, and a replica of another node's
  snapshots. **fault** ends when every agent has received the message to continue.
- **takeover**: after the fault, the coordinator's node is lost. Another process, which has a copy of the job state,
  becomes the coordinator. All other agents connect to the new coordinator at the same time, and the new coordinator
  orders all ranks to abandon their step. **takeover** ends when every agent has received the message to abandon the
  step.
- **CPU s** is the processor time of the coordinator's process. **MB** and **messages** count sent and received
  messages. **memory** is the resident memory of the coordinator's process at the end.

Measured on {machine["cores"]} cores ({machine["cpu"]}), Python {machine["python"]}.

```
{document["command"]}
```

## Limits

- Agents and coordinator share {machine["cores"]} cores of one machine, so most of `fault, s` is the work of the agents.
- The simulated agents answer at once, so the figures do not include the time in which ranks abandon a step, create
  process groups and restore their state.
"""
