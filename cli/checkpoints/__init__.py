"""`hp-ext checkpoints`: what lies in the tiers, one file a subcommand."""

from __future__ import annotations

import click

from ..lazy_group import LazyGroup, Section

COMMANDS = {
    "list": "Show what lies in each tier, newest first.",
    "show": "Show what one checkpoint holds, and how to load it.",
    "verify": "Read every byte, and compare it with what was saved.",
    "copy": "Copy checkpoints to another place, verified on the way.",
    "prune": "Delete checkpoints that need not be kept.",
}


@click.group(
    cls=LazyGroup,
    sections=[Section("Commands", __name__, COMMANDS)],
    epilog="""\b
Examples:
  hp-ext checkpoints list -f job.yaml
  hp-ext checkpoints verify s3://bucket/prefix/my-job
  hp-ext checkpoints copy s3://bucket/prefix/my-job ./my-job --step 1000

\b
PLACE is where the checkpoints of one job lie, s3://bucket/prefix/my-job or a directory such as
/fsx/checkpoints/my-job, or the name of a local job.""",
)
def command() -> None:
    """Look at checkpoints, verify, copy and prune them. No job needs to run, and nothing here needs torch."""
