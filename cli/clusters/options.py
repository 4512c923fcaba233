"""Options that several `hp-ext cluster` commands share, and functions that read the cluster's file and run the CDK
app."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .cluster_spec import ignore_option, read_cluster, say_warnings

if TYPE_CHECKING:
    from hyperpod_ext.clusters.cdk.assembly import Assembly, Template
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.load import Loaded

F = TypeVar("F", bound=Callable[..., Any])


def region_option(function: F) -> F:
    """Add the option `--region` to a command that gets the name of a cluster instead of a file."""
    help = "AWS region. Default: the region that the `aws` command uses."
    return click.option("--region", metavar="REGION", help=help)(function)


def file_options(function: F) -> F:
    """Add the options `-f`, `--set`, `--app`, `--scale` and `--ignore` to a command."""
    for decorate in (
        ignore_option,
        click.option(
            "--scale/--no-scale",
            default=None,
            help="Deploy the machines of the file, or no machines. Default: as deployed now; a new cluster gets none.",
        ),
        click.option(
            "--app", type=click.Path(), metavar="DIR", help="Folder of the CDK app. Default: the one in this checkout."
        ),
        click.option(
            "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the spec. Repeatable."
        ),
        click.option(
            "-f", "--file", "file", required=True, type=click.Path(), metavar="FILE", help="The cluster's spec."
        ),
    ):
        function = decorate(function)
    return function


def read_checked(file: str, overrides: tuple[str, ...], ignored: tuple[str, ...]) -> Loaded[ClusterConfig]:
    """Return the cluster's spec from `file`, after all checks that do not need the CDK app."""
    from hyperpod_ext.clusters.deployment import problems
    from hyperpod_ext.errors import UnsupportedError

    loaded = read_cluster(file, overrides)
    if found := list(problems(loaded.config, ignored)):
        raise UnsupportedError(loaded.locate(found))
    say_warnings(loaded, ignored)
    return loaded


def make_templates(loaded: Loaded[ClusterConfig], out: Path, app: str | None, scale: bool) -> Assembly:
    """Run the CDK app, and return the templates that it writes to the folder `out`."""
    from hyperpod_ext.clusters.cdk.synth import synthesise

    region = loaded.config.region
    return synthesise(loaded.document.data, out, app=app, scale=scale, region=region)


def has_machines(templates: Mapping[str, Template]) -> bool:
    """Return whether a HyperPod cluster in the templates has machines."""
    from hyperpod_ext.clusters.cdk.assembly import resources_of
    from hyperpod_ext.clusters.cdk.changes import CLUSTER

    return any(
        int(group.get("InstanceCount", 0)) > 0
        for template in templates.values()
        for resource in resources_of(template).values()
        if resource["Type"] == CLUSTER
        for member in ("InstanceGroups", "RestrictedInstanceGroups")
        for group in resource.get("Properties", {}).get(member, [])
    )
