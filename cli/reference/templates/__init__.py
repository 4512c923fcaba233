"""The commands `hp-ext templates ...`, for the templates of rendered files. Each command has its own file."""

from __future__ import annotations

import click

from ...lazy_group import LazyGroup, Section

COMMANDS = {
    "list": "List the shipped templates.",
    "show": "Print one template.",
    "diff": "Compare your own templates with the shipped templates.",
    "eject": "Write templates into a folder, to edit them.",
}


@click.group(
    cls=LazyGroup,
    sections=[Section("Commands", __name__, COMMANDS)],
    epilog="""\b
Example:
  hp-ext templates eject my-templates hyperpod_eks/job.yaml.j2
  hp-ext render -f job.yaml --target hyperpod-eks --templates my-templates""",
)
def command() -> None:
    """Show and copy the templates from which submitted files are rendered. With `--templates DIR`, `hp-ext render` and
    `hp-ext create-job` use the templates in DIR instead of shipped templates of the same name."""
