"""hp-ext top: what every rank of a running job does now."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ..command import Command, output_option, target_option
from ..output import columns, print_result

if TYPE_CHECKING:
    from hyperpod_ext.runtime.metrics.meters import Meters
    from hyperpod_ext.submit.contract.job_status import JobStatus, StatusUpdate

_MOST_RANKS = 32
"""Ranks that get a line of their own; of more, those that are behind come first."""


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext top tiny-gpt
  hp-ext top tiny-gpt --once -o json""",
)
@click.argument("job", metavar="NAME|URL")
@target_option
@click.option("--once", is_flag=True, help="Show how it stands now, and end. So it is without a terminal.")
@output_option()
def command(job: str, target: str, once: bool, output: str) -> None:
    """Follow a job that runs: step, goodput, faults, what each rank does. The numbers are those of `metrics`.

    Jobs on Kubernetes and SageMaker tell their state alone; the rest can be read at the port of `metrics` there.
    """
    from hyperpod_ext.submit.contract.handle import JobHandle
    from hyperpod_ext.submit.contract.targets import get_target

    handle = JobHandle.parse(job, target)
    updates = get_target(handle.target).watch(handle)
    if once or output != "table" or not sys.stdout.isatty():
        followed = Followed()
        now = followed.take(next(iter(updates)))
        print_result(now, output, table(now))
        return
    _follow(updates)


def _follow(updates: Iterable[StatusUpdate]) -> None:
    from rich.live import Live
    from rich.text import Text

    followed = Followed()
    with Live(refresh_per_second=4) as live:
        for update in updates:
            live.update(Text(table(followed.take(update))))


class Followed:
    """Adds moments up. The undisturbed run, where there is one, is counted by itself."""

    def __init__(self) -> None:
        self._run = ""
        self._meters: Meters | None = None

    def take(self, update: StatusUpdate) -> dict[str, Any]:
        """The job as it stands now."""
        from hyperpod_ext.runtime.events.reading import read_followed
        from hyperpod_ext.runtime.metrics.meters import Meters

        for entry in update.events:
            if self._meters is None or entry["run"] != self._run:
                self._run, self._meters = entry["run"], Meters()
            if (event := read_followed(entry)) is not None:
                self._meters.add(event)
        return job_numbers(update.status, self._meters or Meters())


def job_numbers(status: JobStatus, meters: Meters) -> dict[str, Any]:
    """One job's numbers, as scripts read them. What is not known yet is null."""
    took = [rank.step_s for rank in meters.ranks.values() if rank.step_s is not None]
    step_s = max(took, default=None)
    step, of = meters.step if meters.step is not None else status.step, meters.of or status.of
    left = None if of is None or step is None or step_s is None else (of - step) * step_s
    return {
        "name": status.name,
        "handle": status.handle,
        "state": status.state if status.ended or meters.state != "recovering" else meters.state,
        "step": step,
        "of": of,
        "loss": meters.loss,
        "step_s": None if step_s is None else round(step_s, 4),
        "left_s": None if left is None or status.ended else round(left, 1),
        "goodput": None if meters.goodput is None else round(meters.goodput, 4),
        "world_size": meters.world_size,
        "nodes": meters.nodes,
        "generation": meters.generation,
        "faults": meters.faults.total(),
        "recoveries": meters.recoveries,
        "steps_lost": meters.steps_lost,
        "nodes_lost": meters.nodes_lost,
        "seconds": {phase: round(seconds, 3) for phase, seconds in meters.seconds.items()},
        "tiers": {tier: {"newest_step": newest} for tier, newest in sorted(meters.tiers.items())},
        "ranks": [
            {
                "rank": rank,
                "node": now.node,
                "phase": now.phase,
                "step": now.step,
                "step_s": None if now.step_s is None else round(now.step_s, 4),
            }
            for rank, now in sorted(meters.ranks.items())
        ],
    }


def table(now: dict[str, Any]) -> str:
    """The same for people."""
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
        rows.append(("ranks", f"{now['world_size']} on {now['nodes']} nodes, generation {now['generation']}"))
    if now["loss"] is not None:
        rows.append(("loss", f"{now['loss']:.4f}"))
    if now["goodput"] is not None:
        rows.append(("time kept", f"{100 * now['goodput']:.1f} %"))
    if now["faults"]:
        lost = f"{now['steps_lost']} steps made again, {now['nodes_lost']} nodes lost"
        rows.append(("faults", f"{now['faults']}, {now['recoveries']} recovered from, {lost}"))
    return f"{now['name']}\n{columns(rows)}"


def _shares(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    most = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{phase.replace('_', ' ')} {100 * took / total:.1f} %" for phase, took in most if took)


def _left(left_s: float | None) -> str:
    if left_s is None:
        return ""
    minutes, seconds = divmod(round(left_s), 60)
    return f", {minutes // 60} h {minutes % 60} min left" if minutes >= 60 else f", {minutes} min {seconds} s left"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
