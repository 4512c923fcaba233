"""A click group that knows the names of its commands without importing them."""

from __future__ import annotations

import importlib
import keyword
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from hyperpod_ext.terminal import escape_output


class Section(NamedTuple):
    """Commands that `--help` lists under one heading, and whose modules are in one package."""

    heading: str
    package: str
    help: Mapping[str, str]
    """Help text of each command, by the command's name."""


class LazyGroup(click.Group):
    """A click group that imports a command when it is called. The command `create-job` is the object `command` of the
    module `create_job`, in the package of the command's section."""

    def __init__(
        self,
        *arguments: Any,
        sections: Sequence[Section],
        moved: Mapping[str, list[str]] | None = None,
        guessed: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            sections: the commands.
            moved: new words of each command that was renamed, by its old name. The old names still work.
            guessed: command that the error for an unknown command suggests, by the name of a similar command in other
                tools.
        """
        super().__init__(*arguments, **options)
        self._sections, self.moved, self._guessed = sections, moved or {}, guessed or {}
        self._help = {name: line for section in sections for name, line in section.help.items()}
        self._packages = {name: section.package for section in sections for name in section.help}

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run a command. Control characters in all output of the command are escaped."""
        escape_output()
        return super().main(*arguments, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the sections."""
        return list(self._help)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, and return it; None if there is no command with this name."""
        if cmd_name not in self._help:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(
            f".{name}_" if keyword.iskeyword(name) else f".{name}", self._packages[cmd_name]
        )
        command: click.Command = module.command
        command.short_help = self._help[cmd_name]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command like click, but for an unknown command suggest the most similar name."""
        import difflib

        args = [*self.moved.get(args[0], args[:1]), *args[1:]]
        if args[0] not in self._help:
            guessed = [self._guessed[args[0]]] if args[0] in self._guessed else []
            if near := guessed or difflib.get_close_matches(args[0], self._help, n=1):
                ctx.fail(f"There is no command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists of commands for `--help` without importing the commands."""
        width = max(map(len, self._help))
        for section in self._sections:
            with formatter.section(section.heading):
                formatter.write_dl([(name.ljust(width), line) for name, line in section.help.items()])
