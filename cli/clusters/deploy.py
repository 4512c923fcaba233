"""The command `hp-ext cluster deploy`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..command import Command, output_option
from ..output import count, print_result, say, say_error
from .diff import as_deployed, replaced_fields, templates_there
from .options import file_options, make_templates, read_checked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hyperpod_ext.clusters.cdk.assembly import Assembly
    from hyperpod_ext.clusters.cdk.changes import ResourceChange
    from hyperpod_ext.clusters.cdk.deploy import InstallChart, UploadScripts
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.files.load import Loaded


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext cluster deploy -f cluster.yaml
  hp-ext cluster deploy -f cluster.yaml --chart-installed
  hp-ext cluster deploy -f cluster.yaml --scale --yes""",
)
@file_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--allow-replace", is_flag=True, help="Deploy even if existing resources are replaced or deleted.")
@click.option(
    "--chart", type=click.Path(), metavar="DIR", help="Install HyperPod's Helm chart from this folder into EKS."
)
@click.option("--chart-installed", is_flag=True, help="HyperPod's Helm chart is installed; create the cluster now.")
@click.option("--bootstrap", is_flag=True, help="If needed, first run `cdk bootstrap` for the account and region.")
@output_option()
def command(
    file: str,
    overrides: tuple[str, ...],
    app: str | None,
    scale: bool | None,
    ignored: tuple[str, ...],
    yes: bool,
    allow_replace: bool,
    chart: str | None,
    chart_installed: bool,
    bootstrap: bool,
    output: str,
) -> None:
    """Create or update a cluster, its network, storage and EKS. Shows changes and costs, and asks for confirmation.

    A new cluster has no machines; a second deployment with --scale adds the machines. Changes that would replace a
    resource are refused. The same command resumes a deployment that has failed or was interrupted.
    """
    import tempfile
    from pathlib import Path

    from hyperpod_ext.clusters.cdk import stacks
    from hyperpod_ext.clusters.cdk.changes import find_changes
    from hyperpod_ext.clusters.cdk.costs import estimate
    from hyperpod_ext.clusters.cdk.outputs import fetch, keep
    from hyperpod_ext.clusters.cdk.tools import cdk_cli, node_environment

    from .text import changes_text, estimate_text

    loaded = read_checked(file, overrides, ignored)
    cluster = loaded.config
    account = stacks.account(cluster.region)
    _check_account(cluster, account)
    _check_buckets(loaded)
    there = templates_there(cluster, None)
    scaled = as_deployed(scale, there)
    _check_scale(cluster, scaled, f"{cluster.name}-cluster" in there)
    with tempfile.TemporaryDirectory(prefix="hpx-cdk-") as scratch:
        assembly = make_templates(loaded, Path(scratch), app, scaled)
        changes = find_changes(there, assembly.templates())
        costs = estimate(cluster, assembly)
        say(f"account {account}, region {cluster.region}\n{changes_text(changes)}\n\n{estimate_text(costs, scaled)}")
        _refuse_replacing(changes, allow_replace)
        if not yes:
            click.confirm(f"Deploy {cluster.name}?", abort=True, err=True)
        environment = node_environment()
        program = cdk_cli(environment, say)
        _bootstrap(assembly, cluster, account, bootstrap, program, environment)
        _run(cluster, assembly, frozenset(there), app, chart, chart_installed, program, environment)
    found = fetch(cluster.name, cluster.region)
    keep(found)
    result = {
        "name": cluster.name,
        "account": account,
        "region": cluster.region,
        "scale": scaled,
        "changes": [change.to_json() for change in changes],
        "costs": costs.to_json(),
        "outputs": dict(found.values),
    }
    print_result(result, output, f"{cluster.name} is deployed in {cluster.region}")
    if not scaled:
        say(f"the cluster has no machines yet; add them: hp-ext cluster deploy -f {file} --scale")
    say(f"jobs use it with `cluster: {cluster.name}` in their spec")


def _check_account(cluster: ClusterConfig, account: str) -> None:
    from hyperpod_ext.errors import ConfigError, Problem

    wanted = cluster.infrastructure and cluster.infrastructure.account
    if wanted not in (None, account):
        hint = "use the credentials of that account, or correct the field"
        path = "infrastructure.account"
        raise ConfigError(
            [Problem(f"is {wanted}, but the credentials belong to account {account}", path=path, hint=hint)]
        )


def _check_buckets(loaded: Loaded[ClusterConfig]) -> None:
    from hyperpod_ext.clusters.bucket_keys import problems
    from hyperpod_ext.errors import UnsupportedError

    unread: list[str] = []
    found = list(problems(loaded.config, unread))
    for sentence in unread:
        say(f"warning: {sentence}")
    if found:
        raise UnsupportedError(loaded.locate(found))


def _check_scale(cluster: ClusterConfig, scaled: bool, there: bool) -> None:
    from hyperpod_ext.errors import NotFoundError

    if scaled and not there:
        hint = "first deploy without --scale, so that a mistake costs no machines"
        raise NotFoundError(f"cluster {cluster.name} is not deployed yet, so it cannot be scaled", hint=hint)


def _refuse_replacing(changes: Sequence[ResourceChange], allowed: bool) -> None:
    from .diff import BREAKS, say_what_breaks

    if not any(change.breaks for change in changes) or allowed:
        return
    say_what_breaks(changes)
    say_error(
        f"{count(len(replaced_fields(changes)), 'existing resource')} would be replaced or deleted",
        hint="undo the changes of these fields, or allow them with --allow-replace",
    )
    raise click.exceptions.Exit(BREAKS)


def _bootstrap(
    assembly: Assembly, cluster: ClusterConfig, account: str, wanted: bool, program: Path, environment: dict[str, str]
) -> None:
    from hyperpod_ext.clusters.cdk import stacks
    from hyperpod_ext.clusters.cdk.deploy import run_cdk
    from hyperpod_ext.errors import NotFoundError

    if not assembly.needs_bootstrap or stacks.describe(stacks.BOOTSTRAP, cluster.region) is not None:
        return
    place = f"aws://{account}/{cluster.region}"
    if not wanted:
        hint = f"use --bootstrap, or run: {program} bootstrap {place}"
        raise NotFoundError(f"{place} is not bootstrapped for CDK: there is no stack {stacks.BOOTSTRAP}", hint=hint)
    run_cdk(program, environment, cluster.region, "bootstrap", place)


def _run(
    cluster: ClusterConfig,
    assembly: Assembly,
    there: frozenset[str],
    app: str | None,
    chart: str | None,
    chart_installed: bool,
    program: Path,
    environment: dict[str, str],
) -> None:
    from pathlib import Path

    from hyperpod_ext.clusters.cdk.deploy import InstallChart, MakeStacks, UploadScripts, install_chart, run_cdk, steps

    for step in steps(cluster, assembly, there):
        match step:
            case MakeStacks(names=()):
                pass
            case MakeStacks(names=names):
                say(f"deploying {', '.join(names)} ...")
                # `--method direct` skips CloudFormation's change sets, because the user has confirmed the changes
                # already
                options = ("--exclusively", "--require-approval", "never", "--method", "direct", "--progress", "events")
                run_cdk(program, environment, cluster.region, "deploy", *names, "--app", str(assembly.folder), *options)
            case InstallChart() if chart is not None:
                install_chart(cluster, Path(chart))
            case InstallChart() if not chart_installed:
                _stop_for_chart(cluster, step)
            case UploadScripts():
                _upload(cluster, step, app)


def _stop_for_chart(cluster: ClusterConfig, step: InstallChart) -> None:
    from hyperpod_ext.errors import HyperpodExtError

    commands = "\n".join(f"  {command}" for command in step.commands)
    message = f"EKS is ready. HyperPod's Helm chart must be installed in EKS before the cluster is created:\n{commands}"
    raise HyperpodExtError(
        message, hint="then run the same command with --chart-installed; or let --chart DIR install the chart"
    )


def _upload(cluster: ClusterConfig, step: UploadScripts, app: str | None) -> None:
    from hyperpod_ext.clusters.cdk import stacks
    from hyperpod_ext.clusters.cdk.deploy import upload
    from hyperpod_ext.clusters.cdk.tools import find_app
    from hyperpod_ext.errors import HyperpodExtError

    bucket = (stacks.outputs(step.stack, cluster.region) or {}).get(step.output)
    if bucket is None:
        hint = "run `hp-ext cluster deploy` again: the current template has this output"
        raise HyperpodExtError(f"stack {step.stack} has no output {step.output}", hint=hint)
    for uri in upload(find_app(app) / "lifecycle", bucket, step.prefix, cluster.region):
        say(f"uploaded {uri}")
