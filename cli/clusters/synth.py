"""The command `hp-ext cluster synth`."""

from __future__ import annotations

import click

from ..command import Command, output_option
from ..output import count, print_result, say
from .options import file_options, make_templates, read_checked


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext cluster synth -f cluster.yaml
  hp-ext cluster synth -f cluster.yaml --scale --out cdk.out -o json""",
)
@file_options
@click.option(
    "--out",
    default="cdk.out",
    show_default=True,
    type=click.Path(),
    metavar="DIR",
    help="Folder to write the templates to.",
)
@output_option()
def command(
    file: str,
    overrides: tuple[str, ...],
    app: str | None,
    scale: bool | None,
    ignored: tuple[str, ...],
    out: str,
    output: str,
) -> None:
    """Write the CloudFormation templates. Needs Node.js and CDK's Python library, but no network and no AWS account.

    Shows the resources of each stack, and the cost per hour of resources with a known price.
    """
    from pathlib import Path

    from hyperpod_ext.clusters.cdk.costs import estimate

    from .text import contents, contents_text, estimate_text

    loaded = read_checked(file, overrides, ignored)
    assembly = make_templates(loaded, Path(out), app, bool(scale))
    costs = estimate(loaded.config, assembly)
    result = {
        "name": loaded.config.name,
        "out": str(assembly.folder),
        "scale": bool(scale),
        "stacks": contents(assembly),
        "costs": costs.to_json(),
    }
    print_result(result, output, f"{contents_text(assembly)}\n\n{estimate_text(costs, bool(scale))}")
    say(f"{count(len(assembly.stacks), 'template')} in {out}")
