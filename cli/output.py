"""Prints results to stdout in the format of `-o`, and all other messages to stderr."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

import click

from hyperpod_ext.counts import count as count  # for all commands
from hyperpod_ext.terminal import drawing, escape

if TYPE_CHECKING:
    import rich.console

    from hyperpod_ext.errors import HyperpodExtError


def say(text: str) -> None:
    """Print a message on stderr."""
    click.echo(escape(text), err=True)


def console(stream: TextIO) -> rich.console.Console:
    """Return a rich console for progress bars and live tables. The console does not escape control characters, so the
    caller must escape the texts of bars and tables."""
    from rich.console import Console

    return Console(file=drawing(stream))


def print_result(result: Mapping[str, object] | Sequence[object], output: str, table: str) -> None:
    """Print a result on stdout: `result` as JSON or YAML if `output` is `json` or `yaml`, otherwise the text
    `table`."""
    match output:
        case "json":
            _print(json.dumps(result, indent=2))
        case "yaml":
            import yaml

            _print(yaml.safe_dump(json.loads(json.dumps(result)), sort_keys=False), nl=False)
        case _:
            _print(table)


def _print(text: str, *, nl: bool = True) -> None:
    try:
        click.echo(escape(text), nl=nl)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise click.ClickException(f"the output cannot be written: {error.strerror}") from None


def print_error(error: HyperpodExtError, output: str | None) -> None:
    """Print an error on stderr. With `-o json` or `-o yaml`, also print the error as an object on stdout."""
    from hyperpod_ext.errors import ConfigError

    say_error(*(error.problems if isinstance(error, ConfigError) else [error.message]), hint=error.hint)
    if output in ("json", "yaml"):
        print_result({"error": error.to_json()}, output, "")


def print_click_error(error: click.ClickException) -> None:
    """Print an error of click on stderr, with the usage of the command. A group without a command prints its help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        say_error(error.format_message())
    elif isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click 8.2 or newer
        error.show()
    else:
        say(context.get_usage())
        say_error(error.format_message(), hint=f"`{context.command_path} --help` explains the arguments and options")


def say_error(*problems: object, hint: str = "") -> None:
    """Print errors and their common hint on stderr."""
    for problem in problems:
        say(f"error: {problem}")
    if hint:
        say(f"hint: {hint}")


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text, with the cells of each column aligned."""
    rows = [[escape(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
