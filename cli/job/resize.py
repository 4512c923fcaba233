"""The command `hp-ext resize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..command import JOB, Command, output_option, target_option
from ..output import count, print_result, say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext resize tiny-gpt --nodes 3
  hp-ext resize tiny-gpt --nodes 1 --no-wait
  hp-ext resize hyperpod-slurm://research/tiny-gpt --nodes 4""",
)
@click.argument("job", type=JOB, metavar="NAME|URL")
@target_option
@click.option("--nodes", type=click.IntRange(min=1), required=True, metavar="N", help="New number of nodes.")
@click.option(
    "--wait/--no-wait", default=True, help="Wait until the job trains on the new number of nodes. Default: --wait."
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Stop waiting after this time."
)
@output_option()
def command(job: str, target: str, nodes: int, wait: bool, timeout: float | None, output: str) -> None:
    """Resize a running job to more or fewer nodes, without a restart."""
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import RESIZE

    handle = JobHandle.parse(job, target)
    resizer = RESIZE.of(handle.target)
    ordered = resizer.order(handle, nodes)
    if ordered.note:
        say(ordered.note)
    if not wait:
        print_result(
            {"order": ordered.name, "nodes": nodes}, output, f"{handle.name}: {count(nodes, 'node')} requested"
        )
        return
    done = resizer.outcome(ordered, timeout)
    print_result(done, output, _sentence(handle.name, done))


def _sentence(name: str, done: Mapping[str, Any]) -> str:
    if done["of"] == done["nodes"]:
        return f"{name} already has {count(done['nodes'], 'node')}"
    parts = [f"{name}: {done['of']} -> {count(done['nodes'], 'node')}"]
    if "step" in done:
        parts[0] += f" after step {done['step']}, {done['pause_s']:.2f} s without a step"
        parts.append("remaining nodes kept their processes" if done["pids_kept"] else "a process was replaced")
    if done.get("given_back"):
        parts.append(f"returned to Slurm: {', '.join(done['given_back'])}")
    if done.get("kept"):
        parts.append(f"{', '.join(done['kept'])} stays in the allocation: {done['why_kept']}")
    return "; ".join(parts)
