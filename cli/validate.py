"""hp-ext validate"""

from __future__ import annotations

import click

from .command import Command, output_option, spec_options, spec_path
from .output import print_result


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext validate job.yaml
  hp-ext validate -f job.yaml --target local --set nodes=4 -o json""",
)
@spec_options
@click.option("--target", help="Also check that this target can run it.")
@output_option()
def command(
    spec: str | None, file: str | None, cluster: str | None, overrides: tuple[str, ...], target: str | None, output: str
) -> None:
    """Check a job's spec. Every mistake is told at once, with its line and what to write instead."""
    from .spec import Specs

    path = spec_path(file, spec)
    specs = Specs(path, cluster, overrides)
    specs.check(target)
    job = specs.job
    ranks = f"{job.nodes} nodes x {job.workers_per_node} workers_per_node = {job.world_size} ranks"
    result = {"valid": True, "file": path, "name": job.name, "world_size": job.world_size, "target": target}
    print_result(result, output, f"{path}: valid ({job.name}: {ranks})")
