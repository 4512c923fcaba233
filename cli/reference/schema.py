"""hp-ext schema"""

from __future__ import annotations

from typing import Any

import click

from ..command import Command


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext schema > job.schema.json
  hp-ext schema cluster
  hp-ext schema report   # what `hp-ext report -o json` prints
  hp-ext schema event    # a line of events.jsonl

\b
The first line of a spec then names it for editors:
  # yaml-language-server: $schema=job.schema.json""",
)
@click.argument(
    "name",
    type=click.Choice(["job", "cluster", "event", "error", "report", "status", "top"]),
    default="job",
    metavar="[job|cluster|event|error|report|status|top]",
)
def command(name: str) -> None:
    """Print a JSON schema: of a spec, for editors; of an output under -o json; or of the event log.

    error is the output of each command that fails. Later versions may add fields to outputs.
    """
    import json

    from hyperpod_ext.config.base import Config
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.schema import json_schema
    from hyperpod_ext.config.job.job import JobConfig

    from .outputs import OUTPUTS, event_schema

    specs: dict[str, type[Config]] = {"job": JobConfig, "cluster": ClusterConfig}
    schema = event_schema() if name == "event" else json_schema({**specs, **OUTPUTS}[name])
    if name not in specs:
        _allow_more_fields(schema)
    click.echo(json.dumps(schema, indent=2))


def _allow_more_fields(schema: Any) -> None:
    """Later versions may add fields, and readers then keep working."""
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _allow_more_fields(part)
    if isinstance(schema, dict) and schema.get("additionalProperties") is False:
        del schema["additionalProperties"]
