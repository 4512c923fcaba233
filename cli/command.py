"""Error handling and options that all commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


class Command(click.Command):
    """A command that turns the library's errors, and OSErrors with a file, into a message and an exit code.

    Other exceptions are bugs, and keep their traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
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
                hint="check that the path exists and is accessible, or choose another",
            )
        print_error(failure, ctx.params.get("output"))
        ctx.exit(failure.exit_code)


def output_option(*more: str) -> Callable[[F], F]:
    """Add `-o table|json|yaml`, and the formats `more`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json", "yaml", *more]),
        default="table",
        show_default=True,
        help="Format of the result.",
    )


class TargetName(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Name of a target. Help lists all; shells complete them. An unknown target is reported with the spec's
    problems."""

    name = "target"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return all targets, as in `[local|kubeflow]`."""
        return f"[{'|'.join(self._names())}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the targets that begin with `incomplete`."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]

    def _names(self) -> list[str]:
        from hyperpod_ext.jobs.contract.targets import TARGETS

        return list(TARGETS)


TARGET = TargetName()


def target_option(function: F) -> F:
    """Add `--target`, for jobs that are named without a URL."""
    help = "Target to search if the job is named without its URL."
    return click.option("--target", type=TARGET, default="local", show_default=True, help=help)(function)


def spec_options(function: F) -> F:
    """Add the job's spec as option or argument, `--cluster`, `--set`, `--strict` and `--ignore`."""
    for decorate in (
        click.option("--ignore", "ignored", multiple=True, metavar="HPX101", help="Skip this rule. Repeatable."),
        click.option("--strict", is_flag=True, help="Treat warnings as errors."),
        click.option(
            "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the spec. Repeatable."
        ),
        click.option("--cluster", type=click.Path(), metavar="FILE", help="Spec of the cluster that the job must fit."),
        click.option("-f", "--file", type=click.Path(), metavar="FILE", help="The job's spec."),
        click.argument("spec", required=False, type=click.Path(), metavar="[FILE]"),
    ):
        function = decorate(function)
    return function


def spec_path(file: str | None, spec: str | None) -> str:
    """Return the spec's path, from either the option or the argument."""
    if (file is None) == (spec is None):
        raise click.UsageError("Name one spec, for example: -f job.yaml")
    return file or spec or ""
