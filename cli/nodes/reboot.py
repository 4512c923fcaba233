"""The command `hp-ext node reboot`."""

from __future__ import annotations

import click

from ..command import Command
from .recovery import recovery_options, run


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext node reboot research i-0123456789abcdef0 --dry-run
  hp-ext node reboot research ip-10-1-2-3 ip-10-1-2-4""",
)
@recovery_options
def command(cluster: str, names: tuple[str, ...], region: str | None, dry_run: bool, yes: bool, output: str) -> None:
    """Reboot nodes of a HyperPod cluster. Shows the nodes, and asks for confirmation.

    The nodes keep their disks and instance ids. All processes on the nodes end, and the content of memory is lost.
    """
    warning = "jobs lose these nodes until the reboot is done, and the content of the nodes' memory is lost"
    run("reboot", warning, cluster, names, region, dry_run, yes, output)
