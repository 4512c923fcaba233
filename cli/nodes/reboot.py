"""hp-ext node reboot"""

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

    Disks and instance ids stay. Processes end, and memory is lost.
    """
    warning = "jobs on these nodes lose them until they are back, and lose the content of their memory"
    run("reboot", warning, cluster, names, region, dry_run, yes, output)
