"""The command `hp-ext top`, which shows the present state of every rank of a running job."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import click

from hyperpod_ext.planner.advice_model import phase_name
from hyperpod_ext.terminal import escape

from ..command import JOB, Command, output_option, target_option
from ..output import columns, console, count, print_result

_MOST_RANKS = 32
"""Maximum number of ranks in the table. If the job has more ranks, the table shows the ranks that are furthest
behind."""


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext top tiny-gpt
  hp-ext top tiny-gpt --once -o json
  hp-ext top gpt-7b --target hyperpod-eks
  hp-ext top s3://bucket/prefix/gpt-7b""",
)
@click.argument("job", type=JOB, metavar="NAME|URL|PLACE")
@target_option
@click.option("--once", is_flag=True, help="Print once and exit (the default without a terminal).")
@output_option()
def command(job: str, target: str, once: bool, output: str) -> None:
    """Follow a running job: step, goodput, faults, and the phase of each rank.

    The argument is the name or URL of a job, or its checkpoint folder such as s3://bucket/prefix/JOB. On Kubernetes,
    the numbers come from the pod that serves `metrics`, through the API server. For jobs of other targets, and after
    pods are deleted, the numbers come from the events next to the job's checkpoints.
    """
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import get_target

    from .numbers import job_numbers, source_of, updates_of_place
    from .runs import place_of_events

    if (place := place_of_events(job)) is not None:
        moments = updates_of_place(place)
    else:
        handle = JobHandle.parse(job, target)
        source = source_of(handle)
        moments = (
            job_numbers(update.status, source.take(update)) for update in get_target(handle.target).watch(handle)
        )
    if once or output != "table" or not sys.stdout.isatty():
        now = next(iter(moments))
        print_result(now, output, table(now))
        return
    _follow(moments)


def _follow(moments: Iterable[dict[str, Any]]) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(console=console(sys.stdout), refresh_per_second=4) as live:
        for now in moments:
            live.update(Text(escape(table(now))))


def table(now: dict[str, Any]) -> str:
    """Return the present numbers of a job as text."""
    parts = [_head(now)]
    if any(now["seconds"].values()):
        parts.append("time of all ranks: " + _shares(now["seconds"]))
    if now["tiers"]:
        held = [f"{tier} step {known['newest_step']}" for tier, known in now["tiers"].items()]
        parts.append("newest copies: " + ", ".join(held))
    if ranks := now["ranks"]:
        behind = sorted(ranks, key=lambda rank: (rank["step"] is not None, rank["step"] or 0, rank["rank"]))
        shown = ranks if len(ranks) <= _MOST_RANKS else behind[:_MOST_RANKS]
        rows = [("RANK", "NODE", "DOES", "STEP", "SECONDS")]
        rows += [
            (str(rank["rank"]), _or_dash(rank["node"]), rank["phase"], _or_dash(rank["step"]), _or_dash(rank["step_s"]))
            for rank in shown
        ]
        parts.append(columns(rows) + (f"\nand {len(ranks) - len(shown)} more" if len(ranks) > len(shown) else ""))
    return "\n\n".join(parts)


def _head(now: dict[str, Any]) -> str:
    rows = [("state", f"{now['state']}, step {_or_dash(now['step'])} of {now['of'] or '?'}{_left(now['left_s'])}")]
    if now["world_size"] is not None:
        rows.append(("ranks", f"{now['world_size']} on {count(now['nodes'], 'node')}, generation {now['generation']}"))
    if now["loss"] is not None:
        rows.append(("loss", f"{now['loss']:.4f}"))
    if now["goodput"] is not None:
        rows.append(("time kept", f"{100 * now['goodput']:.1f} %"))
    if now["faults"]:
        lost = f"{count(now['steps_lost'], 'step')} repeated, {count(now['nodes_lost'], 'node')} lost"
        rows.append(("faults", f"{now['faults']}, {now['recoveries']} recovered from, {lost}"))
    return f"{now['name']}\n{columns(rows)}"


def _shares(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    most = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{phase_name(phase)} {100 * took / total:.1f} %" for phase, took in most if took)


def _left(left_s: float | None) -> str:
    if left_s is None:
        return ""
    minutes, seconds = divmod(round(left_s), 60)
    return f", {minutes // 60} h {minutes % 60} min left" if minutes >= 60 else f", {minutes} min {seconds} s left"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
