"""hp-ext resize"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from .command import Command, output_option
from .output import print_result


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext resize tiny-gpt --nodes 3
  hp-ext resize tiny-gpt --nodes 1 --no-wait""",
)
@click.argument("job", metavar="NAME|URL")
@click.option("--nodes", type=click.IntRange(min=1), required=True, metavar="N", help="Nodes that it goes on with.")
@click.option("--wait/--no-wait", default=True, help="Return when it trains on that many. Default: --wait.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Wait no longer.")
@output_option()
def command(job: str, nodes: int, wait: bool, timeout: float | None, output: str) -> None:
    """Have a job that runs go on with more or fewer nodes, without starting it again."""
    from hyperpod_ext.errors import Problem, UnsupportedError
    from hyperpod_ext.launch.handle import JobHandle
    from hyperpod_ext.launch.targets import local_resize

    handle = JobHandle.parse(job)
    if handle.target != "local":
        message = f"{handle.target} is resized where its nodes are started; see docs/elastic.md"
        raise UnsupportedError([Problem(message, hint="of target local, this command starts and ends nodes itself")])
    name = local_resize.order(handle, nodes)
    if not wait:
        print_result({"order": name, "nodes": nodes}, output, f"{handle.name}: {nodes} nodes ordered")
        return
    done = local_resize.outcome(handle, name, timeout)
    print_result(done, output, _sentence(handle.name, done))


def _sentence(name: str, done: Mapping[str, Any]) -> str:
    kept = "those that stay kept their processes" if done["pids_kept"] else "a process was replaced"
    pause = f"after step {done['step']}, {done['pause_s']:.2f} s without a step"
    return f"{name}: {done['of']} -> {done['nodes']} nodes {pause}; {kept}"
