"""The command `hp-ext cluster outputs`."""

from __future__ import annotations

import click

from ..command import Command, output_option
from ..output import columns, print_result, say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext cluster outputs research
  hp-ext cluster outputs research --region us-west-2 -o json
  hp-ext cluster outputs research --out .hyperpod_ext/clusters/research.json

\b
Jobs prefer a file .hyperpod_ext/clusters/NAME.json in the folder of their spec to the outputs that are
stored on this machine.""",
)
@click.argument("name")
@click.option("--region", metavar="REGION", help="Region of the cluster. Default: the region of the AWS configuration.")
@click.option("--cached", is_flag=True, help="Show the stored outputs, without a request to AWS.")
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="Also write the outputs to this file.")
@output_option()
def command(name: str, region: str | None, cached: bool, out: str | None, output: str) -> None:
    """Read the outputs of a cluster's CloudFormation stacks, and store them for jobs with `cluster: NAME`."""
    from pathlib import Path

    from hyperpod_ext.clusters.cdk.outputs import fetch, keep, recall, to_json
    from hyperpod_ext.errors import NotFoundError

    if cached:
        kept = recall(name, Path())
        if kept is None:
            hint = f"`hp-ext cluster outputs {name}` reads them from the account"
            raise NotFoundError(f"no outputs of cluster {name} are stored on this machine", hint=hint)
        found = kept
    else:
        found = fetch(name, region)
        say(f"stored in {keep(found)}")
    if out is not None:
        keep(found, Path(out))
    rows = [("OUTPUT", "VALUE"), *sorted(found.values.items())]
    print_result(to_json(found), output, columns(rows))
    say(f"cluster {name} in {found.region or 'an unknown region'}, read {found.age()}")
