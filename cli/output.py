"""Results go to stdout, in the form that was asked for; everything else goes to stderr."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hyperpod_ext.errors import HyperpodExtError


def say(text: str) -> None:
    """A message for a person."""
    click.echo(text, err=True)


def print_result(result: Mapping[str, object] | Sequence[object], output: str, table: str) -> None:
    """`result` as JSON or YAML, or else `table`."""
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
        click.echo(text, nl=nl)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise click.ClickException(f"the output cannot be written: {error.strerror}") from None


def print_error(error: HyperpodExtError, output: str | None) -> None:
    """The message on stderr; scripts that read stdout find the same there as an object."""
    from hyperpod_ext.errors import ConfigError

    say(str(error) if isinstance(error, ConfigError) else f"error: {error}")
    if output in ("json", "yaml"):
        print_result({"error": error.to_json()}, output, "")


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows under one another, as wide as they need to be."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
