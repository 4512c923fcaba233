"""operator.md and operator.json: what was measured on pods of HyperPod EKS, and which aims that meets. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from recovery_page import describe_machine

OURS, HYPERPODRUN, ALONE = "ours", "hyperpodrun", "hyperpodrun alone"
LAUNCHERS = (OURS, HYPERPODRUN, ALONE)
UNTIL_START = "until `/start`"
"""Of those seconds, what passes before the operator lets a node take part: the same under every launcher."""
KILL = "kill -9"
SHARE, KILL_S = 0.2, 1.0
"""Aims: our agent's share of hyperpodrun's seconds, and a `kill -9` under hyperpodrun."""

Seconds = Mapping[str, Mapping[str, Sequence[float]]]
"""By fault and launcher, one for each round."""


def gaps_of(steps: Sequence[Mapping[str, Any]], part: str) -> list[float]:
    """Seconds without a step between one part of a run and the next, less the median step of a rank before that.

    Args:
        steps: events of some ranks, in the order of time.
        part: the event's field that tells the parts apart, as `generation`.
    """
    parts: dict[Any, dict[int, list[float]]] = {}
    for event in steps:
        parts.setdefault(event[part], {}).setdefault(event["rank"], []).append(event["t"])
    gaps, ordinary = list[float](), list[float]()
    for before, after in pairwise(parts.values()):
        ordinary += [later - sooner for times in before.values() for sooner, later in pairwise(times)]
        began, ended = min(times[0] for times in after.values()), max(times[-1] for times in before.values())
        gaps.append(began - ended - statistics.median(ordinary))
    return gaps


def make_document(seconds: Seconds, equal: bool, command: str) -> dict[str, Any]:
    """Medians of all rounds, and which aims they meet."""
    medians = {what: {who: statistics.median(each) for who, each in by.items()} for what, by in seconds.items()}
    both = {what: by for what, by in medians.items() if by.keys() >= {OURS, HYPERPODRUN}}
    aims = {
        f"{what}: our agent takes at most 1/{1 / SHARE:.0f} of the seconds of {other}": _share(by, other) <= SHARE
        for other in (HYPERPODRUN, ALONE)
        for what, by in both.items()
        if other in by
    }
    if KILL in both:
        aims[f"{KILL} under hyperpodrun: at most {KILL_S:.1f} s"] = both[KILL][HYPERPODRUN] <= KILL_S
    aims["all runs came to the same losses and weights, bit for bit"] = equal
    return {
        "about": "seconds from the last step before a fault to the first new one, less the median step before it",
        "machine": describe_machine(),
        "command": command,
        "medians": medians,
        "rounds": seconds,
        "aims": aims,
    }


def _share(by: Mapping[str, float], other: str) -> float:
    return by[OURS] / max(by[other], 1e-3)


def make_table(document: Mapping[str, Any]) -> str:
    """Medians with their ranges, and how many times as long AWS's agent takes; then the aims."""
    head = [*(f"{who}, s" for who in (*LAUNCHERS, UNTIL_START)), *(f"{other} / {OURS}" for other in LAUNCHERS[1:])]
    lines = [f"| fault | {' | '.join(head)} |", "|---|" + "---|" * len(head)]
    for what, by in document["medians"].items():
        cells = [_cell(document["rounds"][what].get(who, ())) for who in (*LAUNCHERS, UNTIL_START)]
        cells += [f"{1 / max(_share(by, who), 1e-3):.1f}" if {OURS, who} <= by.keys() else "-" for who in LAUNCHERS[1:]]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    lines += ["", *(f"- {'met' if met else 'NOT met'}: {aim}" for aim, met in document["aims"].items())]
    return "\n".join(lines)


def _cell(each: Sequence[float]) -> str:
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" if each else "-"


def make_page(document: Mapping[str, Any]) -> str:
    """The page in docs/benchmarks."""
    machine = document["machine"]
    rounds = max((len(each) for by in document["rounds"].values() for each in by.values()), default=0)
    return f"""\
# Faults on pods of HyperPod EKS, under our agent and under hyperpodrun

`make bench-operator` writes this page, and [operator.json](operator.json) with every round.

{make_table(document)}

The table has medians of {rounds} rounds with their ranges. In each round, every launcher is measured once. The seconds
are the time from the last step before the fault to the first step after the recovery, less the median duration of a
step before the fault.

- The job has 2 pods with 2 ranks each, and a spare pod for faults in which a pod is lost. In a resize, each pod has one
  rank. The model is small, and the ranks use gloo. Snapshots are kept in the nodes' memory, in a peer's memory, and in
  a shared directory.
- The operator is a stand-in that polls every 50 ms, so the figures do not include the delay of AWS's operator. Under
  every launcher, the replacement of a lost pod waits for four polls of the operator. The column *until `/start`* has
  the seconds of this wait. With `restart.policy: continue`, the other ranks train while a lost pod is replaced. The
  first pod's agent is the coordinator, and one of two nodes cannot elect another coordinator. If the first pod is lost,
  the other pod therefore continues only after the operator has started the spare.
- *hyperpodrun* is AWS's real agent, version 1.1.3, with the options `--inprocess-restart` and `--monitor-interval` and
  with our fork server, as `hp-ext` renders it. A resize is measured without `--inprocess-restart` and
  `--monitor-interval`, because the operator's elastic policy does not work with `--inprocess-restart`. *hyperpodrun
  alone* starts the script without our fork server.
- For hangs, each agent has the settings that detect a hang fastest, in a job with steps of 0.05 s. Our agent detects a
  hang if a rank makes no progress for four times the duration of a slow step, and for at least 0.25 s. AWS's agent has
  a rule that reports a hang after 1 s without a log line, the shortest time that its rules allow.
- All pods and ranks share the machine's cores. A lost pod is not started again. On a cluster, the new pod would start
  on another machine; in this benchmark, its start would use one of the cores for seconds.

Measured on {machine["cores"]} cores ({machine["cpu"]}), Python {machine["python"]}, torch {machine["torch"]},
load average {machine["load_average"][0]:g} at the end.

```
{document["command"]}
```
"""
