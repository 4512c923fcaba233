"""The command `hp-ext move`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..command import JOB, Command, output_option, target_option
from ..output import count, print_result


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext move tiny-gpt --node 1
  hp-ext move hyperpod-slurm://research/tiny-gpt --node gpu-3
  hp-ext move hyperpod-slurm://research/tiny-gpt --node gpu-3 --no-drain""",
)
@click.argument("job", type=JOB, metavar="NAME|URL")
@target_option
@click.option(
    "--node", required=True, metavar="N", help="Number of the node in the job; on Slurm also the node's name."
)
@click.option(
    "--drain/--no-drain",
    default=True,
    help="Drain the node in Slurm, so that no other job starts on it. Default: --drain.",
)
@click.option("--wait/--no-wait", default=True, help="Wait until the node has stopped. Default: --wait.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Stop waiting after this time."
)
@output_option()
def command(job: str, target: str, node: str, drain: bool, wait: bool, timeout: float | None, output: str) -> None:
    """Move the ranks of a node to a spare node between two steps, and stop the job's processes on the node.

    Use this command before maintenance or removal of a node. The move loses no step, and does not count as a fault. The
    job needs a spare node. With --no-wait, the node is not drained in Slurm.
    """
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import MOVE

    handle = JobHandle.parse(job, target)
    mover = MOVE.of(handle.target)
    ordered = mover.move(handle, node)
    if not wait:
        print_result(
            {"order": ordered.name, "node": node}, output, f"{handle.name}: the ranks of node {node} will move"
        )
        return
    done = mover.moved(ordered, timeout, drain=drain)
    print_result(done, output, _sentence(handle.name, done))


def _sentence(name: str, done: Mapping[str, Any]) -> str:
    pause = f"after step {done['step']}, {done['pause_s']:.2f} s without a step"
    if done["to"] is None:  # no spare node was left, so the job continues with fewer nodes
        parts = [f"{name}: node {done['node']} has left, {done['of']} -> {count(done['nodes'], 'node')} {pause}"]
    else:
        parts = [f"{name}: node {done['to']} has the ranks of node {done['node']} {pause}"]
    parts.append("the other ranks kept their processes" if done["pids_kept"] else "a process was replaced")
    if done.get("drain"):
        parts.append(f"{done['drain']} is drained")
    if done.get("why_no_drain"):
        parts.append(f"Slurm does not drain the node: {done['why_no_drain']}")
    if done.get("given_back"):
        parts.append(f"returned to Slurm: {', '.join(done['given_back'])}")
    if done.get("kept"):
        parts.append(f"{', '.join(done['kept'])} stays in the allocation: {done['why_kept']}")
    return "; ".join(parts)
