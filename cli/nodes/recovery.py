"""Options, confirmation and results of `hp-ext node reboot` and `hp-ext node replace`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..clusters.options import region_option
from ..command import output_option
from ..output import columns, print_result, say

if TYPE_CHECKING:
    from hyperpod_ext.clusters.node_recovery import Action

F = TypeVar("F", bound=Callable[..., Any])


def recovery_options(function: F) -> F:
    """Add the arguments CLUSTER and NODE and the options `--region`, `--dry-run`, `--yes` and `-o` to a command."""
    for decorate in (
        output_option(),
        click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
        click.option("--dry-run", is_flag=True, help="Show the nodes and the request, without sending it."),
        region_option,
        click.argument("names", nargs=-1, required=True, metavar="NODE..."),
        click.argument("cluster", metavar="CLUSTER"),
    ):
        function = decorate(function)
    return function


def run(
    action: Action,
    warning: str,
    cluster: str,
    names: Sequence[str],
    region: str | None,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Show the nodes, ask for confirmation, send the requests, and report nodes that AWS refuses. The first refused
    node determines the exit code."""
    from hyperpod_ext.clusters import node_recovery

    from ..clusters.nodes import text

    found = node_recovery.find_nodes(cluster, region, names)
    requests = node_recovery.recovery_requests(cluster, found)
    result: dict[str, object] = {"cluster": cluster, "action": action, "nodes": found, "requests": requests}
    if dry_run:
        print_result(result, output, text(found))
        say(f"nothing was sent; {warning}")
        return
    if not yes:
        say(text(found))
        say(warning)
        click.confirm(f"{action.capitalize()} {len(found)} node{'s' * (len(found) > 1)}?", abort=True, err=True)
    outcomes = list(node_recovery.recover(action, requests, region))
    print_result(result | {"outcomes": outcomes}, output, _outcomes_text(action, outcomes))
    click.get_current_context().exit(node_recovery.exit_code(outcomes))


def _outcomes_text(action: str, outcomes: Sequence[Mapping[str, Any]]) -> str:
    accepted = f"{action} is under way"
    return columns(
        [(one["id"], accepted if one["accepted"] else f"refused: {one['code']}: {one['message']}") for one in outcomes]
    )
