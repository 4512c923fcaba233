"""The command `hp-ext chaos`."""

from __future__ import annotations

import click

from ..command import JOB, Command, F, output_option
from ..output import print_result

_KINDS = {
    "exception": "The training function raises an exception.",
    "sigkill": "SIGKILL kills the rank's process. With --node: all of the job's processes on the node.",
    "sigsegv": "The rank's process crashes with SIGSEGV.",
    "hang": "The rank's process hangs, in the way that --how names.",
    "slow": "The rank takes --seconds longer for each phase, for --steps steps.",
    "oom": "The rank allocates more memory than its limit.",
    "cut-network": "The rank's connections to other ranks close. With --node: the node's connection to the job's "
    "coordinator closes.",
    "corrupt-memory": "A bit flips in the rank's snapshots in memory.",
    "corrupt-weights": "A bit flips in the rank's first parameter.",
}


def _kinds(function: F) -> F:
    for kind, text in reversed(_KINDS.items()):
        function = click.option(f"--{kind}", "kind", flag_value=kind, help=text)(function)
    return function


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext chaos tiny-gpt --sigkill --rank 1
  hp-ext chaos tiny-gpt --exception --rank 2 --step 40 --phase backward
  hp-ext chaos tiny-gpt --hang --rank 0 --how deadlock
  hp-ext chaos tiny-gpt --sigkill --node 1
  hp-ext chaos hyperpod-eks://team-a@eks/gpt-7b --sigkill --rank 9 --yes""",
)
@click.argument("job", type=JOB, metavar="NAME|URL")
@_kinds
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Rank in which the fault is injected.")
@click.option("--node", type=click.IntRange(min=0), metavar="N", help="Node whose processes all get the fault.")
@click.option(
    "--step", type=click.IntRange(min=1), metavar="S", help="Step in which the fault happens. Default: immediately."
)
@click.option(
    "--phase",
    type=click.Choice(["data", "forward", "backward", "optimizer", "rest", "checkpoint"]),
    help="Phase of the step in which the fault happens. Default: the first phase.",
)
@click.option(
    "--how",
    type=click.Choice(["stop", "deadlock", "loop", "gil"]),
    help="How the process hangs with --hang. Default: stop.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds by which --slow delays each phase after the fault. Default: 0.2.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Number of steps that --slow delays. Default: 1.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation on targets that cost money.")
@output_option()
def command(
    job: str,
    kind: str | None,
    rank: int | None,
    node: int | None,
    step: int | None,
    phase: str | None,
    how: str | None,
    seconds: float | None,
    steps: int | None,
    yes: bool,
    output: str,
) -> None:
    """Inject a fault into a running job, to test its recovery. Works on target local, and with kubectl on
    hyperpod-eks."""
    from hyperpod_ext.config.fault_injection import InjectedFault, NodeFault
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import FAULTS, get_target

    if kind is None:
        raise click.UsageError(f"Name one fault: {', '.join(f'--{name}' for name in _KINDS)}.")
    if (rank is None) == (node is None):
        raise click.UsageError("Name either --rank or --node.")
    given = {"step": step, "phase": phase, "how": how, "seconds": seconds, "steps": steps}
    more = {name: value for name, value in given.items() if value is not None}
    handle = JobHandle.parse(job)
    faults = FAULTS.of(handle.target)
    fault: InjectedFault | NodeFault
    if node is None:
        fault = InjectedFault.model_validate({"kind": kind, "rank": rank, **more})
    elif more or kind not in ("sigkill", "hang", "cut-network"):
        others = "--step, --phase, --how, --seconds or --steps"
        raise click.UsageError(f"--node works only with --sigkill, --hang or --cut-network, and not with {others}.")
    else:
        fault = NodeFault.model_validate({"kind": kind, "node": node})
    where = f"rank {rank}" if node is None else f"node {node}"
    if not yes and not get_target(handle.target).capabilities().chaos:
        click.confirm(
            f"{handle.name} runs on machines that cost money. Inject {kind} into {where}?", abort=True, err=True
        )
    name = faults.order(handle, fault)
    when = f" in step {step}" if step is not None else ""
    print_result({"order": name, **fault.model_dump()}, output, f"{kind} requested for {where}{when}")
