"""Applies the options `--set path=value` to a document, before the document is checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hyperpod_ext.config.files.document import Document, Path, SourceLocation, dotted, parse
from hyperpod_ext.counts import count
from hyperpod_ext.errors import Problem


@dataclass(frozen=True, slots=True)
class Override:
    """A change of one field by a command-line option."""

    path: str
    """Dotted path of the field."""
    text: str
    """The new value as YAML."""
    source: str
    """The option as the user wrote it, for error messages."""


def apply_overrides(document: Document, overrides: Iterable[str | Override]) -> None:
    """Write each override into `document`, and record the option as the source of the value."""
    for override in overrides:
        if isinstance(override, str):
            path, equals, text = override.partition("=")
            override = Override(path if equals else "", text, f"--set {override}")
        problem = _apply(document, override)
        if problem is not None:
            document.problems.append(problem)


def _apply(document: Document, override: Override) -> Problem | None:
    name, text, source = override.path, override.text, override.source
    if not all(name.split(".")):
        return Problem("is not of the form path=value", source=source, hint="write --set nodes=2")
    value = parse(text, source)
    if value.problems:
        return value.problems[0]
    path = document.path_of(name)
    if problem := _write(document, path, value.data if text.strip() else None, source):
        return problem
    for known in [known for known in document.locations if known[: len(path)] == path]:
        del document.locations[known]
    document.locations[path] = SourceLocation(source)
    for below, place in value.locations.items():
        document.locations[path + below] = SourceLocation(source, text=place.text)
    return None


def _write(document: Document, path: Path, value: object, source: str) -> Problem | None:
    """Write `value` at `path` in the document and create missing parents; return a problem if a parent cannot hold
    it."""
    if document.data is None:
        document.data = {}
    holder = document.data
    for depth, part in enumerate(path):
        below = value if depth == len(path) - 1 else _empty_for(path[depth + 1])
        at, around = dotted(path[: depth + 1]), dotted(path[:depth])
        if isinstance(holder, dict):
            key = str(part)
            if depth == len(path) - 1 or holder.get(key) is None:
                holder[key] = below
                document.locations.setdefault(path[: depth + 1], SourceLocation(source))
            holder = holder[key]
        elif isinstance(holder, list) and isinstance(part, int) and part <= len(holder):
            if part == len(holder):
                holder.append(below)
            elif depth == len(path) - 1 or holder[part] is None:
                holder[part] = below
            document.locations.setdefault(path[: depth + 1], SourceLocation(source))
            holder = holder[part]
        elif depth == 0:
            return None  # validation reports that the document is no mapping
        elif isinstance(holder, list):
            hint = f"write {around}.{len(holder)} to append an item; items are counted from 0"
            return Problem(f"`{around}` has {count(len(holder), 'item')}, so there is no {at}", at, source, hint=hint)
        else:
            message = f"`{around}` is a single value, so it has no field `{part}`"
            return Problem(message, at, source, hint=f"write --set {around}=VALUE")
    return None


def _empty_for(part: str | int) -> object:
    return [] if isinstance(part, int) else {}
