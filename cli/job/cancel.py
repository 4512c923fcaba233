"""The command `hp-ext cancel`."""

from __future__ import annotations

import click

from ..command import JOB, Command, output_option, target_option
from ..output import print_result


@click.command(
    cls=Command,
    epilog="""\b
Example:
  hp-ext cancel tiny-gpt""",
)
@click.argument("job", type=JOB, metavar="NAME|URL")
@target_option
@output_option()
def command(job: str, target: str, output: str) -> None:
    """Stop a job, and wait until all of its processes have ended. A job that has ended already is not changed."""
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import get_target

    handle = JobHandle.parse(job, target)
    place = get_target(handle.target)
    ended_before = place.status(handle).ended
    status = place.cancel(handle)
    text = f"{status.name}: had ended already ({status.state})" if ended_before else f"{status.name}: {status.state}"
    print_result(status.to_json(), output, text)
