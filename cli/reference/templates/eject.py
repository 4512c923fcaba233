"""The command `hp-ext templates eject`."""

from __future__ import annotations

import click

from ...command import Command
from ...output import say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext templates eject my-templates
  hp-ext templates eject my-templates hyperpod_eks/job.yaml.j2""",
)
@click.argument("folder", type=click.Path(file_okay=False), metavar="DIR")
@click.argument("names", nargs=-1, metavar="[NAME]...")
def command(folder: str, names: tuple[str, ...]) -> None:
    """Write the named templates, or all templates, into the folder DIR. Existing files are never overwritten."""
    from pathlib import Path

    from hyperpod_ext.errors import ConflictError
    from hyperpod_ext.jobs.contract.render import template_names, template_text

    from .names import known

    wanted = [known(name) for name in names] or template_names()
    at = Path(folder)
    if there := [name for name in wanted if (at / name).exists()]:
        raise ConflictError(f"{at} has {', '.join(there)} already", hint="remove these files, or choose another folder")
    for name in wanted:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(template_text(name))
        click.echo(at / name)
    say(f"next: edit the templates, then use --templates {at} with hp-ext render or hp-ext create-job")
