"""hp-ext templates: what renders a spec, shown and handed over."""

from __future__ import annotations

import click

from ...lazy_group import LazyGroup, Section

COMMANDS = {
    "list": "List the templates that are shipped.",
    "show": "Print one template.",
    "diff": "Show templates of your own beside those that are shipped.",
    "eject": "Write templates into a folder, to be changed there.",
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
    """Templates hold the shape of what is submitted; `--templates DIR` of render and create-job overrides any."""
