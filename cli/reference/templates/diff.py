"""The command `hp-ext templates diff`."""

from __future__ import annotations

import click

from ...command import Command, output_option
from ...output import print_result, say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext templates diff my-templates
  hp-ext templates diff my-templates -o json""",
)
@click.argument("folder", type=click.Path(file_okay=False), metavar="DIR")
@output_option()
def command(folder: str, output: str) -> None:
    """Compare your own templates in the folder DIR with the shipped templates."""
    from dataclasses import asdict
    from pathlib import Path

    from hyperpod_ext.jobs.own_templates import template_differences, template_problems

    found = template_differences(Path(folder))
    print_result([asdict(one) for one in found], output, "".join(one.diff for one in found).rstrip("\n"))
    if same := [one.name for one in found if not one.diff]:
        say(f"equal to the shipped templates, and therefore not needed: {', '.join(same)}")
    for problem in template_problems(Path(folder)):
        say(f"warning: {problem}")
