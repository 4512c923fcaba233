"""The command group `hp-ext node`, with commands for nodes of a cluster."""

from __future__ import annotations

import click

from ..lazy_group import LazyGroup, Section

COMMANDS = {
    "reboot": "Reboot nodes; their disks keep their content.",
    "replace": "Replace nodes by other machines.",
    "drain": "Stop scheduling jobs on nodes, or allow it again.",
}


@click.group(
    cls=LazyGroup,
    sections=[Section("Commands", f"{__package__.rpartition('.')[0]}.nodes", COMMANDS)],
    epilog="""\b
Examples:
  hp-ext node reboot research i-0123456789abcdef0 --dry-run
  hp-ext node replace research ip-10-1-2-3 --yes
  hp-ext node drain hyperpod-i-0123456789abcdef0

\b
Name a node by its instance id, its logical id, its name in Kubernetes or its host name.
`hp-ext cluster nodes research` lists the nodes of a cluster.""",
)
def command() -> None:
    """Reboot, replace and drain nodes of a HyperPod cluster."""
