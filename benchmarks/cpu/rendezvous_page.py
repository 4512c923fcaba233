"""What people and programs read of the rendezvous benchmark: the document, the tables, the page, the plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from publish import save_plot
from recovery_page import describe_machine
from rendezvous_sides import OURS, SIDES, TORCH, TORCH_LAZY

REINIT, DESTROY, CONNECT_S, SHARE, FREED_S = 0.25, 0.15, 0.1, 2.0, 0.05
"""The aims, at the largest size: ratios to torch, seconds, times a rank's equal share, seconds."""
PHASES = ("connect", "first_init", "reinit", "first_sum", "destroy")
_LABELS = {
    "connect": "store ready",
    "first_init": "first init",
    "reinit": "init again",
    "first_sum": "first all-reduce",
    "destroy": "destroy blocks",
}


def make_document(
    opened: Sequence[Mapping[str, Any]],
    freed: Sequence[Mapping[str, Any]],
    stock_s: float,
    stock_timeout_s: float,
    command: str,
) -> dict[str, Any]:
    """Everything that is known, as rendezvous.json has it."""
    sizes = sorted({one["size"] for one in opened})
    medians = {side: {str(size): _medians(opened, side, size) for size in sizes} for side in SIDES}
    shares = [
        max(one["requests"]) * one["size"] / sum(one["requests"]) for one in opened if one["side"] == OURS
    ]  # 1: served evenly
    loads = [one["load"] for one in opened]
    survivors = {str(size): _freed([one for one in freed if one["size"] == size]) for size in sizes}
    most, largest = str(sizes[-1]), medians[OURS][str(sizes[-1])]
    aims = {
        f"init again at {most} ranks, to torch: at most {REINIT}": _ratio(medians, "reinit", most) <= REINIT,
        f"init again and all-reduce at {most} ranks: at most that of {TORCH_LAZY}": (
            largest["reinit_and_sum"] <= medians[TORCH_LAZY][most]["reinit_and_sum"]
        ),
        f"destroy at {most} ranks, to torch: at most {DESTROY}": _ratio(medians, "destroy", most) <= DESTROY,
        f"store ready at {most} ranks: at most {CONNECT_S * 1000:.0f} ms": largest["connect"] <= CONNECT_S,
        "no name looked up by the store": all(one["look_ups"] == 0 for one in opened if one["side"] == OURS),
        f"no rank serves more than {SHARE:.0f}/N of the requests": max(shares) <= SHARE,
        f"every survivor out within {FREED_S * 1000:.0f} ms, at every size": all(
            one[kind]["most"] <= FREED_S for one in survivors.values() for kind in ("neighbours", "others")
        ),
    }
    return {
        "about": "process groups of N processes on one machine: seconds of the slowest rank",
        "machine": describe_machine(),
        "command": command,
        "sizes": sizes,
        "medians": medians,
        "largest_share_of_requests": max(shares),
        "survivors": survivors,
        "stock": {"timeout_s": stock_timeout_s, "slowest_survivor_s": stock_s},
        "aims": aims,
        "load": [min(loads), max(loads)],
    }


def _medians(opened: Sequence[Mapping[str, Any]], side: str, size: int) -> dict[str, float]:
    mine = [one for one in opened if one["side"] == side and one["size"] == size]
    values = {phase: [v for one in mine for v in _list(one[phase])] for phase in PHASES}
    values["reinit_and_sum"] = [a + b for one in mine for a, b in zip(one["reinit"], one["first_sum"], strict=True)]
    return {name: median(found) for name, found in values.items()}


def _list(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def _freed(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for kind in ("neighbours", "others"):
        times = sorted(max(0.0, t) for one in runs for t in one[kind])
        found[kind] = {
            "median": median(times), "p95": times[int(0.95 * (len(times) - 1))], "most": times[-1], "count": len(times)
        }  # fmt: skip
    spent = {name: median(t for one in runs for t in one[name]) for name in ("cpu", "queued")}
    return {**found, "spent": spent}


def _ratio(medians: Mapping[str, Any], phase: str, size: str) -> float:
    return float(medians[OURS][size][phase] / medians[TORCH][size][phase])


def make_tables(document: Mapping[str, Any]) -> str:
    """Opening and closing by size, then how survivors came free, then the aims."""
    medians, sizes = document["medians"], [str(size) for size in document["sizes"]]
    lines = [f"{'milliseconds, medians':<44}" + "".join(f"{size + ' ranks':>10}" for size in sizes)]
    for phase in (*PHASES, "reinit_and_sum"):
        for side in SIDES:
            label = f"{_LABELS.get(phase, 'init again and all-reduce')}, {side}"
            lines.append(f"{label:<44}" + "".join(f"{medians[side][size][phase] * 1000:>10.1f}" for size in sizes))
    for phase in ("reinit", "destroy", "reinit_and_sum"):
        label = f"ratio to torch, {_LABELS.get(phase, 'init and all-reduce')}"
        lines.append(f"{label:<44}" + "".join(f"{_ratio(medians, phase, size):>10.2f}" for size in sizes))
    lines += ["", f"{'survivors out, ms after the death':<44}{'median':>10}{'95 %':>10}{'slowest':>10}{'of':>8}"]
    for size in sizes:
        for kind, label in (("neighbours", "the dead rank's neighbours"), ("others", "the others")):
            one = document["survivors"][size][kind]
            figures = "".join(f"{one[name] * 1000:>10.1f}" for name in ("median", "p95", "most"))
            lines.append(f"{size + ' ranks, ' + label:<44}{figures}{one['count']:>8}")
    lines += ["", f"{'one survivor until it is out, ms, medians':<44}{'CPU time':>10}{'run queue':>10}"]
    for size in sizes:
        spent = document["survivors"][size]["spent"]
        lines.append(f"{size + ' ranks':<44}{spent['cpu'] * 1000:>10.1f}{spent['queued'] * 1000:>10.1f}")
    stock = document["stock"]
    lines += [
        "",
        f"stock torch, 4 ranks: the slowest survivor came out after {stock['slowest_survivor_s']:.2f} s,"
        f" of a group timeout of {stock['timeout_s']:.0f} s",
        f"largest share of the store's requests that one rank served: {document['largest_share_of_requests']:.2f}/N"
        " (TCPStore: all in one)",
        "",
        *(f"{'met    ' if met else 'NOT met'} {aim}" for aim, met in document["aims"].items()),
    ]
    return "\n".join(lines)


def make_page(document: Mapping[str, Any]) -> str:
    """rendezvous.md."""
    machine = document["machine"]
    most = str(document["sizes"][-1])
    medians = document["medians"]
    return f"""\
# Process groups without a central store

`make bench-rendezvous` writes this page, [rendezvous.json](rendezvous.json) and the plot.

![Opening again and closing, by number of ranks](rendezvous.svg)

At {most} ranks, creating the process groups again takes **{_ratio(medians, "reinit", most):.2f}** of torch's time, and
destroying the process groups takes **{_ratio(medians, "destroy", most):.2f}** of torch's time.

```
{make_tables(document)}
```

## What is measured

The benchmark runs N processes (ranks) on one machine, with gloo on the loopback interface. Each process has one thread,
and is forked from a process that has finished all imports. All ranks begin a phase at the same time, and the phase ends
when the last rank has finished. *Destroy blocks* is the time that the slowest rank's call to destroy the process groups
takes.

- **{OURS}**: each rank has a key-value server, and gloo connects two ranks at their first message. *Store ready*
  includes the start of the server, the exchange of all addresses through one process, and an authenticated request to
  another rank's server. Connections between ranks stay open when the process groups are created again. Through an open
  connection, a rank receives the new address of the other rank without a request. The process that forks the ranks has
  used a store once before the fork, like the fork server of a job.
- **{TORCH}**: rank 0 has a `TCPStore` with torch's defaults. The same `TCPStore` is used, with another prefix, when the
  process groups are created again, which favours torch. Every rank connects to every other rank at once.
- **{TORCH_LAZY}**: torch with `TORCH_GLOO_LAZY_INIT=1`, an option of newer versions of torch, with which ranks connect
  at their first message.

*First all-reduce* includes the time to open connections that do not exist yet. For *survivors out*, a rank in the
middle of the ring dies during an all-reduce. *Survivors out* is the time from the detection of the death to the
exception in the main thread of a survivor (a rank that did not die). Half of the deaths happen in all-reduces of 4
bytes, and half in all-reduces of 4 MB. 0 ms means that the survivor raised an exception before the death was detected.
*CPU time* is the processor time of the survivor's process from the message that reports the death to the exception.
*Run queue* is the time in which the survivor's main thread waited for a core before the exception, as the kernel counts
it (schedstat).

Measured on {machine["cores"]} cores ({machine["cpu"]}), Python {machine["python"]}, torch {machine["torch"]}, load
average {document["load"][0]:.1f} to {document["load"][1]:.1f} at the start of each measurement.

```
{document["command"]}
```

## Limits

- All ranks share {machine["cores"]} cores, so the figures at 64 ranks show the work of all ranks together, and not the
  delay of one rank. The run queue shows how long a rank waits for the other ranks' work. The message that reports the
  death is sent to one rank after another, and each rank that receives the message takes a core from the sender.
- While more threads are ready to run than the machine has cores, a rank that has raised an exception waits before it
  closes its process groups: 1.5 ms times the number of ready threads per core, at most 50 ms. If other processes keep
  the cores busy all the time, waiting before the process groups are closed has no use.
- On one machine, connections cost no network round trip. Over a network, opening a connection costs more, and
  {OURS} opens fewer connections than torch.
- The main advantage of {OURS} over torch with lazy connections is not speed, but that no single process serves
  the store for all ranks. [The store by number of ranks](store.md) has the cost for more ranks than one machine can
  run.
- Requests are counted at the server, including a rank's requests to itself. Look-ups of host names are counted in
  Python, because the store of {OURS} is written in Python.
"""


def draw(document: Mapping[str, Any], file: Path) -> None:
    """Write `file`, whose suffix says the format."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans"})
    from matplotlib import pyplot as plt

    colors = {OURS: "#274060", TORCH: "#c8553d", TORCH_LAZY: "#b9822b"}
    figure, axes = plt.subplots(1, 3, figsize=(10.0, 3.6), facecolor="white")
    titles = {
        "reinit": "init again, ms",
        "reinit_and_sum": "with the first all-reduce, ms",
        "destroy": "destroy blocks, ms",
    }
    for plot, (phase, title) in zip(axes, titles.items(), strict=True):
        for side in SIDES:
            values = [document["medians"][side][str(size)][phase] * 1000 for size in document["sizes"]]
            plot.plot(document["sizes"], values, marker="o", color=colors[side], label=side)
        plot.set_xscale("log", base=2)
        plot.set_yscale("log")
        plot.set_xticks(document["sizes"], [str(size) for size in document["sizes"]])
        plot.set_title(title, loc="left")
        plot.set_xlabel("ranks")
        plot.grid(True, color="#e6e6e6", linewidth=0.8)
        for spine in plot.spines.values():
            spine.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    save_plot(figure, file)
