"""The command `hp-ext exec`."""

from __future__ import annotations

import click

from ..command import JOB, Command, output_option, target_option
from ..output import print_result


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="""\b
Examples:
  hp-ext exec --target hyperpod-eks gpt-7b -- nvidia-smi
  hp-ext exec --target hyperpod-slurm --node 3 gpt-7b -- dmesg
  hp-ext exec --target hyperpod-eks -t gpt-7b -- bash""",
)
@target_option
@click.option("--node", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the node in the job.")
@click.option("-t", "--terminal", is_flag=True, help="Connect this terminal, for interactive programs.")
@click.option("--dry-run", is_flag=True, help="Show the command, and stop.")
@output_option()
@click.argument("job", type=JOB, metavar="NAME|URL")
@click.argument("words", nargs=-1, required=True, metavar="-- COMMAND...")
def command(
    target: str, node: int, terminal: bool, dry_run: bool, output: str, job: str, words: tuple[str, ...]
) -> None:
    """Run a command on a node of a running job: with kubectl on Kubernetes, with srun on Slurm.

    Write options before the job's name. The exit code is the exit code of the command on the node.
    """
    import shlex

    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import SHELL

    from . import check_exists, run

    words = words[words[0] == "--" :]  # click leaves `--` in `words`, because hp-ext's options precede the job
    if not words:
        raise click.UsageError("Write the command after --, for example: hp-ext exec gpt-7b -- nvidia-smi")
    handle = JobHandle.parse(job, target)
    check_exists(handle)
    made = SHELL.of(handle.target).exec_command(handle, node, words, terminal)
    if dry_run:
        print_result({"command": made}, output, shlex.join(made))
        return
    click.get_current_context().exit(run(made))
