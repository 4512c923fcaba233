"""The reference of the command line, one page for each section of `hp-ext --help`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
from hyperpod_ext.cli import SECTIONS, hp_ext


def pages() -> dict[str, str]:
    """Return the pages of the command line, by their paths on the site."""
    made = {"reference/cli/index.md": _index()}
    for section in SECTIONS:
        made[f"reference/cli/{slug(section.heading)}.md"] = _section(section.heading, list(section.help))
    return made


def slug(heading: str) -> str:
    """Return the name of a section's page."""
    return heading.lower().replace(" ", "-")


def anchor(name: str) -> str:
    """Return the anchor of a command's heading."""
    return "hp-ext-" + name.replace(" ", "-")


def commands() -> dict[str, str]:
    """Return the path and anchor of every command's description on the site, by the command's name."""
    return {
        name: f"reference/cli/{slug(section.heading)}.md#{anchor(name)}"
        for section in SECTIONS
        for first in section.help
        for name, _ in _tree(first)
    }


def _index() -> str:
    parts = [
        "# Command line",
        "`hp-ext` is the command line of this project. It needs neither torch nor a GPU, unless a command says so. "
        "`hp-ext completion` prints a completion script for your shell.",
        "Every command that prints a table accepts `-o json` and `-o yaml`. "
        "[Exit codes](../exit-codes.md) lists the results of commands for scripts.",
    ]
    for section in SECTIONS:
        page = f"{slug(section.heading)}.md"
        rows = [f"| [`hp-ext {name}`]({page}#{anchor(name)}) | {line} |" for name, line in section.help.items()]
        parts += [f"## {section.heading}", "\n".join(["| command | purpose |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def _section(heading: str, names: list[str]) -> str:
    parts = [f"# Commands: {heading}"]
    for first in names:
        parts += [_command(name, command) for name, command in _tree(first)]
    return "\n\n".join(parts) + "\n"


def _tree(name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the command `name` and all of its subcommands."""
    command = hp_ext.get_command(click.Context(hp_ext), name)
    assert command is not None
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in command.list_commands(context):
            below = command.get_command(context, inner)
            assert below is not None
            yield f"{name} {inner}", below


def _command(name: str, command: click.Command) -> str:
    root = click.Context(hp_ext, info_name="hp-ext")
    context = click.Context(command, info_name=name, parent=root)
    level = "##" if " " not in name else "###"
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [
        f"{level} hp-ext {name} {{#{anchor(name)}}}",
        _prose(command.help or command.short_help or ""),
        f"```text\n{usage}\n```",
    ]
    rows = [row for one in command.get_params(context) if (row := _parameter(one, context))]
    if rows and not isinstance(command, click.Group):
        parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    if command.epilog:
        parts.append(_epilog(command.epilog))
    return "\n\n".join(part for part in parts if part)


def _prose(text: str) -> str:
    """Return help text as Markdown: paragraphs, and code for the parts that click does not wrap."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if paragraph.startswith("\b"):
            paragraphs.append("```text\n" + paragraph.removeprefix("\b").strip("\n") + "\n```")
        else:
            paragraphs.append(_escape(re.sub(r"\s+", " ", paragraph)))
    return "\n\n".join(paragraphs)


def _parameter(parameter: click.Parameter, context: click.Context) -> str:
    record = parameter.get_help_record(context)
    if record is None or not record[1]:
        return ""
    names, meaning = record
    return f"| `{_cell(names)}` | {_escape(_cell(meaning))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _escape(text: str) -> str:
    """Escape the characters of help text that Markdown would read as HTML or emphasis, outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", part.replace("`", "\\`")) for part in parts
    )


def _epilog(text: str) -> str:
    """Return the end of a help text. Examples become a code block, and other paragraphs stay paragraphs."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        plain = paragraph.removeprefix("\b").strip("\n")
        head, _, rest = plain.partition("\n")
        if re.match(r"Examples?:$", head.strip()):
            lines = "\n".join(line.removeprefix("  ") for line in rest.splitlines())
            parts.append(f"{head.strip()}\n\n```bash\n{lines}\n```")
        else:
            parts.append(_prose(paragraph))
    return "\n\n".join(parts)
