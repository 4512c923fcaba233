"""The command `hp-ext cluster diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..command import Command, output_option
from ..output import print_result, say
from .options import file_options, has_machines, make_templates, read_checked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hyperpod_ext.clusters.cdk.assembly import Template
    from hyperpod_ext.clusters.cdk.changes import ResourceChange
    from hyperpod_ext.config.clusters.cluster import ClusterConfig

BREAKS, CHANGES = 10, 11

ENDS = ("network", "storage", "eks", "cluster", "addons", "observability")
"""Last parts of the names of a cluster's stacks. A stack is named `CLUSTER-PART`."""


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext cluster diff -f cluster.yaml
  hp-ext cluster diff -f cluster.yaml --against cdk.out --exit-code -o json

\b
Exit codes: 0 no resource would be replaced or deleted; 10 a resource would be replaced or deleted;
with --exit-code also 11: there are changes, but no resource would be replaced or deleted.""",
)
@file_options
@click.option(
    "--against",
    type=click.Path(),
    metavar="DIR",
    help="Compare with the templates in this folder. Needs no AWS account.",
)
@click.option("--exit-code", is_flag=True, help="Exit with 11 for changes that replace or delete no resource.")
@output_option()
def command(
    file: str,
    overrides: tuple[str, ...],
    app: str | None,
    scale: bool | None,
    ignored: tuple[str, ...],
    against: str | None,
    exit_code: bool,
    output: str,
) -> None:
    """Compare the cluster's file with the deployed stacks, field by field. Exits with 10 if a resource would be
    replaced."""
    import tempfile
    from pathlib import Path

    from hyperpod_ext.clusters.cdk.changes import find_changes

    from .text import changes_text

    loaded = read_checked(file, overrides, ignored)
    there = templates_there(loaded.config, against)
    with tempfile.TemporaryDirectory(prefix="hpx-cdk-") as scratch:
        wanted = make_templates(loaded, Path(scratch), app, as_deployed(scale, there)).templates()
    found = find_changes(there, wanted)
    result = {
        "name": loaded.config.name,
        "changes": [change.to_json() for change in found],
        "replaces": replaced_fields(found),
    }
    print_result(result, output, changes_text(found))
    if any(change.breaks for change in found):
        say_what_breaks(found)
        raise click.exceptions.Exit(BREAKS)
    if found and exit_code:
        raise click.exceptions.Exit(CHANGES)


def templates_there(cluster: ClusterConfig, against: str | None) -> Mapping[str, Template]:
    """Return the templates to compare with: from the folder `against`, or by default the deployed templates from
    AWS."""
    from pathlib import Path

    from hyperpod_ext.clusters.cdk.assembly import read_assembly
    from hyperpod_ext.clusters.cdk.stacks import templates

    if against is not None:
        return read_assembly(Path(against)).templates()
    return templates([f"{cluster.name}-{end}" for end in ENDS], cluster.region)


def as_deployed(scale: bool | None, there: Mapping[str, Template]) -> bool:
    """Return whether to deploy machines: `scale`, or if `scale` is None, whether the cluster has machines now."""
    return has_machines(there) if scale is None else scale


def replaced_fields(changes: Sequence[ResourceChange]) -> list[str]:
    """Return the fields whose change replaces or deletes a resource, as STACK.RESOURCE.FIELD. A resource that is
    deleted as a whole is returned as STACK.RESOURCE."""
    found = []
    for change in changes:
        stuck = [field for field in change.fields if field.effect != "update"]
        found += [f"{change.stack}.{change.id}.{field.path}" for field in stuck]
        if change.breaks and not stuck:
            found.append(f"{change.stack}.{change.id}")
    return found


def say_what_breaks(changes: Sequence[ResourceChange]) -> None:
    """Print each resource that would be replaced or deleted, with the changed fields that are the reason."""
    for change in changes:
        if not change.breaks:
            continue
        stuck = [field for field in change.fields if field.effect != "update"]
        why = ", ".join(f"{field.path} ({field.effect})" for field in stuck) or change.effect
        say(f"warning: {change.stack}: {change.kind} {change.id}: {why}")
