"""The command `hp-ext doctor`."""

from __future__ import annotations

import click

from ..command import JOB, Command, output_option
from ..output import columns, print_result


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext doctor
  hp-ext doctor --offline -o json
  hp-ext doctor --job tiny-gpt""",
)
@click.option("--context", metavar="NAME", help="Name of a kubeconfig context. Default: the current context.")
@click.option("--offline", is_flag=True, help="Send no requests.")
@click.option(
    "--job",
    type=JOB,
    metavar="JOB",
    help="Show a local job's checkpoints, its last fault, and the outcome of the next one.",
)
@output_option()
def command(context: str | None, offline: bool, job: str | None, output: str) -> None:
    """Check the installation, which services are reachable, and whether the cluster's operator accepts rendered jobs.

    With --job: show a local job's checkpoints, its last fault, and the expected outcome of the next fault.
    """
    if job is not None:
        from .doctor_job import describe_job, look_at_job

        of_job = look_at_job(job)
        print_result(of_job, output, describe_job(of_job))
        return
    from dataclasses import asdict

    from hyperpod_ext.jobs.doctor import look_at_cluster, look_here

    found = [*look_here(), *([] if offline else look_at_cluster(context))]
    rows = [(one.state, one.what, one.finding) for one in found]
    print_result([asdict(one) for one in found], output, columns(rows))
    hints = [f"{one.what}: {one.hint}" for one in found if one.hint]
    if hints and output == "table":
        click.echo("\n" + "\n".join(hints))
