"""The command `hp-ext templates show`."""

from __future__ import annotations

import click

from ...command import Command


@click.command(
    cls=Command,
    epilog="""\b
Example:
  hp-ext templates show hyperpod_eks/job.yaml.j2""",
)
@click.argument("name", metavar="NAME")
def command(name: str) -> None:
    """Print the text of one shipped template."""
    from hyperpod_ext.jobs.contract.render import template_text

    from .names import known

    click.echo(template_text(known(name)), nl=False)
