"""The commands `hp-ext checkpoints ...`, for the checkpoints of a job. Each command has its own file."""

from __future__ import annotations

import click

from ..lazy_group import LazyGroup, Section

COMMANDS = {
    "list": "List the checkpoints of each tier, newest first.",
    "show": "Show the content of one checkpoint, and how to load it.",
    "verify": "Read every byte, and compare checksums and signatures.",
    "copy": "Copy checkpoints to another place, and verify them.",
    "prune": "Delete checkpoints that the retention policy does not keep.",
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
PLACE is the folder of one job's checkpoints, s3://bucket/prefix/my-job or a directory such as
/fsx/checkpoints/my-job, or the name of a local job.""",
)
def command() -> None:
    """Show, verify, copy and prune checkpoints. The commands for checkpoints need neither a running job nor torch."""
