"""Error handling and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


class Command(click.Command):
    """A click command that shows an error of the library, or an OSError about a file, as a message with an exit code.

    All other exceptions are bugs, and are shown with their traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and handle its errors."""
        from hyperpod_ext.errors import HyperpodExtError

        from .output import print_error

        try:
            return super().invoke(ctx)
        except HyperpodExtError as error:
            failure = error
        except OSError as error:
            if error.filename is None:
                raise
            failure = HyperpodExtError(
                f"{error.filename}: {error.strerror}",
                hint="check that the path exists and is accessible, or choose another path",
            )
        print_error(failure, ctx.params.get("output"))
        ctx.exit(failure.exit_code)


def output_option(*more: str) -> Callable[[F], F]:
    """Add the option `-o` to a command, with the formats `table`, `json`, `yaml` and those in `more`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json", "yaml", *more]),
        default="table",
        show_default=True,
        help="Format of the result.",
    )


class TargetName(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Type of an option whose value is the name of a target. `--help` lists all targets, and shells complete them.
    click accepts unknown targets, because a command reports them together with the problems of the spec."""

    name = "target"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the names of all targets for `--help`, such as `[local|kubeflow]`."""
        return f"[{'|'.join(self._names())}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names of targets that begin with `incomplete`."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]

    def _names(self) -> list[str]:
        from hyperpod_ext.jobs.contract.targets import TARGETS

        return list(TARGETS)


TARGET = TargetName()


class JobName(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Type of an argument whose value is the name or URL of a job. Shells complete the names of the jobs of `--target`,
    and the error for a missing argument lists them. click accepts all values."""

    name = "job"

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        """Return the names of the target's jobs as text for the error; None if there are no jobs."""
        names = self._names(ctx)
        return f"Jobs: {', '.join(names)}" if names else None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names of jobs that begin with `incomplete`."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self._names(ctx) if name.startswith(incomplete)]

    def _names(self, ctx: click.Context | None) -> list[str]:
        from hyperpod_ext.errors import HyperpodExtError
        from hyperpod_ext.jobs.contract.targets import get_target

        try:
            return [job.name for job in get_target((ctx and ctx.params.get("target")) or "local").list_jobs()]
        except HyperpodExtError:  # complete no names if the target cannot be reached
            return []


JOB = JobName()


def target_option(function: F) -> F:
    """Add the option `--target` to a command that gets a job's name or URL."""
    help = "Target to search if the job is named without its URL."
    return click.option("--target", type=TARGET, default="local", show_default=True, help=help)(function)


def spec_options(function: F) -> F:
    """Add the options `-f`, `--cluster`, `--set`, `--strict` and `--ignore`, and an argument for the job's spec, to a
    command."""
    for decorate in (
        click.option("--ignore", "ignored", multiple=True, metavar="HPX101", help="Skip this rule. Repeatable."),
        click.option("--strict", is_flag=True, help="Treat warnings as errors."),
        click.option(
            "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the spec. Repeatable."
        ),
        click.option(
            "--cluster", type=click.Path(), metavar="FILE", help="Spec of a cluster; check that the job fits it."
        ),
        click.option("-f", "--file", type=click.Path(), metavar="FILE", help="The job's spec."),
        click.argument("spec", required=False, type=click.Path(), metavar="[FILE]"),
    ):
        function = decorate(function)
    return function


def spec_path(file: str | None, spec: str | None) -> str:
    """Return the path of the job's spec, which the user names with the option `-f` or with the argument."""
    if (file is None) == (spec is None):
        raise click.UsageError("Name one spec, for example: -f job.yaml")
    return file or spec or ""
