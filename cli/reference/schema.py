"""The command `hp-ext schema`."""

from __future__ import annotations

import click

from ..command import Command


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext schema > job.schema.json
  hp-ext schema cluster
  hp-ext schema report             # the output of `hp-ext report -o json`
  hp-ext schema checkpoints list   # the output of `hp-ext checkpoints list -o json`
  hp-ext schema event              # a line of events.jsonl

\b
To make editors use the schema, write this as the first line of a spec:
  # yaml-language-server: $schema=job.schema.json""",
)
@click.argument("words", nargs=-1, metavar="[job|cluster|event|error|COMMAND]")
def command(words: tuple[str, ...]) -> None:
    """Print the JSON schema of a spec, of a command's output with -o json, or of an event in the event log.

    The schema `error` describes the output of every command that fails although its options are valid. Later versions
    may add fields to outputs.
    """
    import json

    from hyperpod_ext.config.base import Config
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.nearest import suggest
    from hyperpod_ext.config.files.schema import json_schema
    from hyperpod_ext.config.job.job import JobConfig
    from hyperpod_ext.errors import NotFoundError

    from .. import hp_ext
    from ..outputs.schemas import OUTPUTS, event_schema, output_schema

    name = " ".join(words) or "job"
    name = " ".join(hp_ext.moved.get(name, [name]))
    specs: dict[str, type[Config]] = {"job": JobConfig, "cluster": ClusterConfig}
    known = [*specs, "event", *OUTPUTS]
    if name not in known:
        raise NotFoundError(f"there is no schema {name}", hint=suggest(name, known))
    schema = event_schema() if name == "event" else json_schema(specs[name]) if name in specs else output_schema(name)
    click.echo(json.dumps(schema, indent=2))
