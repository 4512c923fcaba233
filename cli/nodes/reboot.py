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
    """Reboot nodes of a HyperPod cluster. Shows them, and asks.

    Disks and instance ids stay; processes and memory do not.
    """
    warning = "a job that runs there loses these nodes until they are back, with what their memory holds"
    run("reboot", warning, cluster, names, region, dry_run, yes, output)
