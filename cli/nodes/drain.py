"""The command `hp-ext node drain`."""

from __future__ import annotations

import click

from ..command import Command, output_option
from ..output import columns, count, print_result, say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext node drain hyperpod-i-0123456789abcdef0 --dry-run
  hp-ext node drain gpu-[1-3] --target hyperpod-slurm --reason "NVLink errors"
  hp-ext node drain gpu-[1-3] --target hyperpod-slurm --undo""",
)
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@click.option(
    "--target",
    type=click.Choice(["hyperpod-eks", "hyperpod-slurm"]),
    default="hyperpod-eks",
    show_default=True,
    help="Scheduler of the nodes: EKS of the kubeconfig's current context, or Slurm of this machine.",
)
@click.option(
    "--reason", default="hp-ext node drain", show_default=True, help="Reason that Slurm shows for the drained nodes."
)
@click.option("--undo", is_flag=True, help="Allow jobs on the nodes again.")
@click.option("--dry-run", is_flag=True, help="Show the pods or jobs on the nodes, without draining.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@output_option()
def command(
    names: tuple[str, ...], target: str, reason: str, undo: bool, dry_run: bool, yes: bool, output: str
) -> None:
    """Drain nodes: stop new jobs from starting on them, and on EKS also evict their pods.

    Shows the nodes' pods or jobs, and asks for confirmation.

    On EKS, all pods on the nodes are evicted, including pods of jobs, but not pods of daemon sets. On Slurm, running
    jobs continue until they end.
    """
    on_target = _on_slurm if target == "hyperpod-slurm" else _on_kubernetes
    on_target(names, reason, undo, dry_run, yes, output)


def _on_kubernetes(names: tuple[str, ...], reason: str, undo: bool, dry_run: bool, yes: bool, output: str) -> None:
    del reason  # on Kubernetes, a node has no field for the reason of a drain
    from hyperpod_ext.jobs.kubernetes.api import drain
    from hyperpod_ext.jobs.kubernetes.api.client import Client
    from hyperpod_ext.jobs.kubernetes.api.kubeconfig import load_access

    client = Client(load_access(), say=say)
    nodes = drain.find_nodes(client, names)
    pods = [] if undo else drain.pods_on(client, nodes)
    table = columns([("NODE", "POD"), *((pod["node"], f"{pod['namespace']}/{pod['name']}") for pod in pods)])
    if not dry_run:
        _ask(f"Evict {count(len(pods), 'pod')} from {', '.join(nodes)}?", table, yes or undo)
        drain.cordon(client, nodes, cordoned=not undo)
        drain.evict(client, pods)
    _print(nodes, {"pods": pods}, table if pods else "", undo, dry_run, output)


def _on_slurm(names: tuple[str, ...], reason: str, undo: bool, dry_run: bool, yes: bool, output: str) -> None:
    from hyperpod_ext.jobs.slurm import client

    nodes = client.find_nodes(names)
    jobs = [] if undo else client.jobs_on(nodes)
    table = columns([("JOB", ""), *((job, "continues until it ends") for job in jobs)])
    if not dry_run:
        _ask(f"Drain {', '.join(nodes)}?", table if jobs else "no jobs run on these nodes", yes or undo)
        client.take_no_jobs(nodes, None if undo else reason)
    _print(nodes, {"jobs": jobs}, table if jobs else "", undo, dry_run, output)


def _ask(question: str, table: str, yes: bool) -> None:
    if not yes:
        say(table)
        click.confirm(question, abort=True, err=True)


def _print(nodes: list[str], there: dict[str, object], table: str, undo: bool, dry_run: bool, output: str) -> None:
    state = "unchanged" if dry_run else "schedulable" if undo else "unschedulable"
    result = {"nodes": nodes, "state": state} | there
    print_result(result, output, "\n".join(part for part in (table, f"{', '.join(nodes)}: {state}") if part))
