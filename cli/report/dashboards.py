"""The command `hp-ext dashboards`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from ..command import Command
from ..output import say

_FILES = ("dashboard.json", "alerts.yaml", "alerts.test.yaml", "prometheus.yaml")


@click.command(
    cls=Command,
    epilog="""\b
Example:
  hp-ext dashboards monitoring""",
)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def command(folder: Path) -> None:
    """Write the Grafana dashboard and Prometheus alert rules into DIR. Existing files are never overwritten."""
    from hyperpod_ext.errors import ConflictError

    shipped = files("hyperpod_ext.templates") / "observability"
    existing = [str(folder / name) for name in _FILES if (folder / name).exists()]
    if existing:
        raise ConflictError(f"{existing[0]} exists already", hint="choose another folder, or move the file away")
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        (folder / name).write_text((shipped / name).read_text(encoding="utf-8"), encoding="utf-8")
        click.echo(folder / name)
    say("import dashboard.json in Grafana; prometheus.yaml configures scraping of jobs, and loads alerts.yaml")
