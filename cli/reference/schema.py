"""hp-ext schema"""

from __future__ import annotations

import click

from ..command import Command


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext schema > job.schema.json
  hp-ext schema cluster

\b
The first line of a spec then names it for editors:
  # yaml-language-server: $schema=job.schema.json""",
)
@click.argument("spec", type=click.Choice(["job", "cluster"]), default="job", metavar="[job|cluster]")
def command(spec: str) -> None:
    """Print the JSON schema of a spec, with which editors complete and check it."""
    import json

    from hyperpod_ext.config.base import Config
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.schema import json_schema
    from hyperpod_ext.config.job.job import JobConfig

    models: dict[str, type[Config]] = {"job": JobConfig, "cluster": ClusterConfig}
    click.echo(json.dumps(json_schema(models[spec]), indent=2))
