"""The command `hp-ext templates list`."""

from __future__ import annotations

import click

from ...command import Command, output_option
from ...output import print_result


@click.command(
    cls=Command,
    epilog="""\b
Example:
  hp-ext templates list""",
)
@output_option()
def command(output: str) -> None:
    """List the names of the shipped templates."""
    from hyperpod_ext.jobs.contract.render import template_names

    names = template_names()
    print_result(names, output, "\n".join(names))
