"""A click group that knows the names of its commands without importing them."""

from __future__ import annotations

import importlib
import keyword
from typing import Any

import click


class LazyGroup(click.Group):
    """Loads `create-job` from the module `create_job` of `package`, where it is called `command`."""

    def __init__(self, *arguments: Any, commands_help: dict[str, str], package: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._help = commands_help
        self._package = package

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of a first day: init, validate, ..."""
        return list(self._help)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        if cmd_name not in self._help:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f".{name}_" if keyword.iskeyword(name) else f".{name}", self._package)
        command: click.Command = module.command
        command.short_help = self._help[cmd_name]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, but a name that is not there comes with the nearest one."""
        import difflib

        if args[0] not in self._help and (near := difflib.get_close_matches(args[0], self._help, n=1)):
            ctx.fail(f"There is no command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._help.items()))
