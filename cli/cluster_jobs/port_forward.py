"""The command `hp-ext port-forward`."""

from __future__ import annotations

import click

from ..command import JOB, Command, output_option, target_option
from ..output import print_result


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext port-forward gpt-7b 9400 --target hyperpod-eks
  hp-ext port-forward gpt-7b 6006:6006 --target hyperpod-eks --node 2 --dry-run""",
)
@click.argument("job", type=JOB, metavar="NAME|URL")
@click.argument("ports", nargs=-1, required=True, metavar="PORT|HERE:THERE...")
@target_option
@click.option(
    "--node", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the pod's node in the job."
)
@click.option("--dry-run", is_flag=True, help="Show the command, and stop.")
@output_option()
def command(job: str, ports: tuple[str, ...], target: str, node: int, dry_run: bool, output: str) -> None:
    """Forward ports of a job's pod to this machine until Ctrl-C, for example for metrics or TensorBoard. Uses
    kubectl."""
    import shlex

    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import PORTS

    from . import check_exists, run

    handle = JobHandle.parse(job, target)
    check_exists(handle)
    made = PORTS.of(handle.target).forward_command(handle, node, ports)
    if dry_run:
        print_result({"command": made}, output, shlex.join(made))
        return
    click.get_current_context().exit(run(made))
