"""What all commands share: how errors end, and the options that come again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Command(click.Command):
    """Turns the library's errors, and places that cannot be written, into a message and an exit code.

    Other exceptions are faults of the program, and keep their traceback.
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
            failure = HyperpodExtError(f"{error.filename}: {error.strerror}", hint="choose another place")
        print_error(failure, ctx.params.get("output"))
        ctx.exit(failure.exit_code)


def output_option(*more: str) -> Callable[[F], F]:
    """`-o table|json|yaml`, and `more`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json", "yaml", *more]),
        default="table",
        show_default=True,
        help="Form of the result.",
    )


def target_option(function: F) -> F:
    """`--target`, for jobs that are named without a URL."""
    help = "Where a job is that is named without its URL."
    return click.option("--target", default="local", show_default=True, help=help)(function)


def spec_options(function: F) -> F:
    """The job's spec as option or argument, `--cluster`, `--set`, `--strict` and `--ignore`."""
    for decorate in (
        click.option(
            "--ignore", "ignored", multiple=True, metavar="HPX101", help="Leave this rule out; may come again."
        ),
        click.option("--strict", is_flag=True, help="Warnings are errors."),
        click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field; may come again."),
        click.option("--cluster", type=click.Path(), metavar="FILE", help="Cluster that the job must fit."),
        click.option("-f", "--file", type=click.Path(), metavar="FILE", help="The job's spec."),
        click.argument("spec", required=False, type=click.Path(), metavar="[FILE]"),
    ):
        function = decorate(function)
    return function


def spec_path(file: str | None, spec: str | None) -> str:
    """The one file that was named, by option or by argument."""
    if (file is None) == (spec is None):
        raise click.UsageError("Name one spec, as in: -f job.yaml")
    return file or spec or ""
