"""`hp-ext templates`: the templates of rendered files, one file a subcommand."""

from __future__ import annotations

import click

from ...lazy_group import LazyGroup, Section

COMMANDS = {
    "list": "List the templates that are shipped.",
    "show": "Print one template.",
    "diff": "Compare your own templates with the shipped ones.",
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
    """Templates render the submitted files. `--templates DIR` of render and create-job replaces any of them."""
