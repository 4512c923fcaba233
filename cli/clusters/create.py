"""The command `hp-ext cluster create`."""

from __future__ import annotations

import click

from ..command import Command, output_option
from ..output import print_result, say
from .cluster_spec import ignore_option, read_cluster, say_warnings, with_lines


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext cluster create -f cluster.yaml --dry-run
  hp-ext cluster create -f cluster.yaml --dry-run --check-account
  hp-ext cluster create -f cluster.yaml --wait""",
)
@click.option("-f", "--file", "file", required=True, type=click.Path(), metavar="FILE", help="The cluster's spec.")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the spec. Repeatable.")
@click.option(
    "--dry-run", is_flag=True, help="Check the spec, and show the request without sending it. Needs no network."
)
@click.option(
    "--check-account",
    is_flag=True,
    help="Also check the spec against the account: subnets, training plans, file systems, quotas, lifecycle scripts, "
    "and EKS version.",
)
@click.option("--wait", is_flag=True, help="Wait until the cluster is in service or has failed.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop waiting after this time; the creation continues.",
)
@ignore_option
@output_option()
def command(
    file: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    check_account: bool,
    wait: bool,
    timeout: float | None,
    ignored: tuple[str, ...],
    output: str,
) -> None:
    """Create a HyperPod cluster. The whole spec is checked before a request is sent."""
    import json
    from dataclasses import replace

    from hyperpod_ext.clusters import service

    loaded = read_cluster(file, overrides)
    if check_account:
        from hyperpod_ext.clusters.account import with_account

        asked, unread = with_account(loaded.config)
        loaded = replace(loaded, config=asked)
        for sentence in unread:
            say(f"warning: {sentence}")
    cluster = loaded.config
    with with_lines(loaded):
        request = service.checked_create_request(cluster, ignored)
    say_warnings(loaded, ignored)
    if dry_run:
        print_result({"request": request}, output, json.dumps(request, indent=2))
        say(f"{cluster.name} was not created; this is the CreateCluster request")
        return
    arn = service.create(cluster, request)
    result: dict[str, object] = {"name": cluster.name, "region": cluster.region, "arn": arn}
    if wait:
        for status in service.wait(cluster, timeout):
            say(f"{cluster.name}: {status}")
            result["status"] = status
    print_result(result, output, arn)
