"""The command `hp-ext node replace`."""

from __future__ import annotations

import click

from ..command import Command
from .recovery import recovery_options, run


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext node replace research hyperpod-i-0123456789abcdef0 --yes
  hp-ext node replace research ip-10-1-2-3 ip-10-1-2-4""",
)
@recovery_options
def command(cluster: str, names: tuple[str, ...], region: str | None, dry_run: bool, yes: bool, output: str) -> None:
    """Replace nodes of a HyperPod cluster by other machines. Shows the nodes, and asks for confirmation.

    The content of a node's memory and local disks is lost, including snapshots of jobs. The new machine has another
    instance id.
    """
    warning = "jobs lose these nodes, and the content of the nodes' memory and disks is lost"
    run("replace", warning, cluster, names, region, dry_run, yes, output)
