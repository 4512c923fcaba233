"""hp-ext node replace"""

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

    Everything on a node is lost: checkpoints in memory, local disks, and its instance id.
    """
    warning = "jobs on these nodes lose them, and the content of their memory and disks"
    run("replace", warning, cluster, names, region, dry_run, yes, output)
