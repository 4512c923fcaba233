"""The command `hp-ext create-job`."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import click

from ..command import TARGET, Command, output_option, spec_options, spec_path
from ..interrupts import held_back, remembered
from ..output import print_result, say, say_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hyperpod_ext.config.files.overrides import Override
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.plan import Plan


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext create-job -f job.yaml --target local --wait
  hp-ext create-job -f job.yaml --wait --kill rank=1@step=20 -o json
  hp-ext create-job -f job.yaml --wait --set spares=1 --kill node=1@step=20
  hp-ext create-job -f job.yaml --set nodes=4 --dry-run""",
)
@spec_options
@click.option("--target", type=TARGET, default="local", show_default=True, help="Target that runs the job.")
@click.option(
    "--templates", type=click.Path(), metavar="DIR", help="Folder whose templates replace the shipped templates."
)
@click.option("--dry-run", is_flag=True, help="Show the files that would be submitted, without submitting them.")
@click.option("--server-dry-run", is_flag=True, help="Let the target's server check the job, without submitting it.")
@click.option("--wait", is_flag=True, help="Show progress until the job has ended, and then show its result.")
@click.option("--follow", is_flag=True, help="Also show the output of the workers. Implies --wait.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop waiting after this time; the job continues.",
)
@click.option(
    "--kill",
    "kills",
    multiple=True,
    metavar="rank=R@step=S|node=N@step=S",
    help="Inject this fault instead of the faults in the spec.",
)
@click.option("--no-kill", is_flag=True, help="Inject no fault.")
@output_option("name")
def command(
    spec: str | None,
    file: str | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    strict: bool,
    ignored: tuple[str, ...],
    target: str,
    templates: str | None,
    dry_run: bool,
    server_dry_run: bool,
    wait: bool,
    follow: bool,
    timeout: float | None,
    kills: tuple[str, ...],
    no_kill: bool,
    output: str,
) -> None:
    """Submit a job. With --wait, Ctrl-C cancels the job, and the exit code is 7 if the job fails."""
    from ..spec import Specs

    if kills and no_kill:
        raise click.UsageError("--kill and --no-kill cannot be used together.")
    specs = Specs(spec_path(file, spec), cluster, [*overrides, *fault_overrides(kills)], strict, ignored, target)
    if no_kill:
        specs.without_faults()
    plan = specs.plan(target, templates)
    from hyperpod_ext.jobs.submit import read_back, rehearse, submit

    if dry_run:
        read_back(plan)
        print_result(plan.to_json(), output, _plan_text(plan))
        return
    if server_dry_run:
        checked = {"name": plan.name, "target": target, "accepted": True}
        rehearse(plan)
        print_result(checked, output, f"{plan.name}: {target} would accept this job; nothing was submitted")
        return
    if target == "local":
        _say_what_goes(plan.name)
    if wait or follow:
        submit_and_wait(plan, output, timeout, follow)
        return
    with held_back():  # delay Ctrl-C until the job is submitted, so that the user learns the job's name
        handle = submit(plan)
    result = {"name": handle.name, "target": handle.target, "handle": str(handle)}
    print_result(result, output, handle.name if output == "name" else str(handle))
    job = handle.in_commands
    say(f"next: hp-ext status {job}, hp-ext logs {job} --follow, hp-ext cancel {job}")


def _say_what_goes(name: str) -> None:
    """Print a note for each old run of the job `name` that the next submission of the job removes."""
    from hyperpod_ext.jobs.local.store import KEPT, removed_by_next

    for old in removed_by_next(name):
        say(f"note: the old run in {old} is removed; the newest {KEPT} runs of a job name are kept")


def fault_overrides(kills: tuple[str, ...]) -> list[Override]:
    """Return the `--kill` options as changes of the spec, so that a wrong rank in an option is reported like a mistake
    in the spec."""
    from hyperpod_ext.config.fault_injection import KillFault
    from hyperpod_ext.config.files.overrides import Override

    changes = []
    for index, text in enumerate(kills):
        source = f"--kill {text}"
        try:
            fault = KillFault.parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--kill") from None
        if index == 0:
            changes.append(Override("chaos.faults", "[]", source))
        changes.append(Override(f"chaos.faults.{index}", fault.model_dump_json(exclude_none=True), source))
    return changes


def submit_and_wait(plan: Plan, output: str, timeout: float | None, follow: bool) -> None:
    """Submit a job, and wait until it has ended. Ctrl-C and SIGTERM cancel the job."""
    from hyperpod_ext.errors import UserInterruptError
    from hyperpod_ext.jobs.contract.targets import get_target
    from hyperpod_ext.jobs.submit import submit

    handle = None
    try:
        with held_back():
            handle = submit(plan)
        wait_for_end(handle, output, timeout, follow)
    except KeyboardInterrupt:
        if handle is None:
            raise
        say(f"\ncancelling {handle.name} ...")
        get_target(handle.target).cancel(handle)
        raise UserInterruptError(f"job {handle.name} was cancelled; no process of the job is running") from None


def _explained(handle: JobHandle, result: Mapping[str, Any]) -> bool:
    """Return whether a job completed no step for a known reason: mode `plain`, or training outside of run.steps()."""
    from hyperpod_ext.jobs.local.store import latest
    from hyperpod_ext.runtime.events.of_training import UNPROTECTED

    if any(UNPROTECTED in warning for warning in result.get("warnings") or ()):
        return True
    found = latest(handle.name) if handle.target == "local" else None
    return found is not None and found.read_job().mode == "plain"


def wait_for_end(handle: JobHandle, output: str, timeout: float | None, follow: bool) -> None:
    """Show the progress of a job until it has ended, and then show its result. The exit code is 7 if the job has
    failed."""
    # treat SIGTERM, which CI systems and schedulers send, like Ctrl-C, so that it cancels the job
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with remembered() as check:
        from hyperpod_ext.errors import JobFailedError

        from ..report.report import describe_result, warn, why_it_differs
        from ..report.runs import read_result

        folder = _show_progress(handle, timeout, follow, check)
    result = read_result(handle)
    text = describe_result(result) if "recoveries" in result else f"{handle.name}: {result['state']}"
    print_result(result, output, handle.name if output == "name" else text)
    warn(result)
    if result["state"] != "succeeded":
        _exit_as_failed(result, folder)
    if result.get("steps") == 0 and not result.get("resumed_step") and not _explained(handle, result):
        say("warning: the job made no step; the script must call its @resilient function, which must use run.steps()")
    if (different := why_it_differs(result)) is not None:
        say_error(different[0], hint=different[1])
        raise click.exceptions.Exit(JobFailedError.exit_code)


def _show_progress(handle: JobHandle, timeout: float | None, follow: bool, check: Callable[[], None]) -> str:
    """Show the progress of a job until it has ended, and return the folder with its files.

    Args:
        check: function that raises KeyboardInterrupt if an earlier interrupt was lost.
    """
    from hyperpod_ext.errors import WaitTimeoutError
    from hyperpod_ext.jobs.contract.targets import get_target

    from .progress import make_progress

    deadline = None if timeout is None else time.monotonic() + timeout
    folder = ""
    with make_progress() as progress:
        for update in get_target(handle.target).watch(handle, with_lines=follow):
            check()
            progress.show(update)
            folder = update.status.folder
            if deadline is not None and time.monotonic() > deadline and not update.status.ended:
                hint = f"the job continues: hp-ext status {handle.name}, hp-ext cancel {handle.name}"
                raise WaitTimeoutError(f"{handle.name} is still running after {timeout:g} s", hint=hint)
    return folder


def _exit_as_failed(result: Mapping[str, Any], folder: str) -> None:
    """Print on stderr why the job failed and where its logs are, and exit with the code of a failed job."""
    from hyperpod_ext.errors import JobFailedError
    from hyperpod_ext.jobs.contract.handle import JobHandle

    error = result["error"] or {"message": f"the job was {result['state']}", "hint": ""}
    say_error(error["message"], hint=error["hint"])
    files = f", or the files in {folder}" if folder else ""
    say(f"logs: hp-ext logs {JobHandle.parse(result['handle']).in_commands}{files}")
    raise click.exceptions.Exit(JobFailedError.exit_code)


def _plan_text(plan: Plan) -> str:
    from ..spec import ranks_of

    head = f"{plan.name} on {plan.target}: {ranks_of(plan.job)}\nnothing was submitted; these files would be submitted:"
    return "\n".join([head, *(f"\n--- {name}\n{text}".rstrip("\n") for name, text in plan.files.items())])
