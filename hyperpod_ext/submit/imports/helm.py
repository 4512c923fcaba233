"""Placeholders of Helm: `{{ .Values.name | default 4 | quote }}`, without what only Helm itself can do. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hyperpod_ext.errors import ConfigError, Problem

_ACTION = re.compile(r"\{\{-?\s*(?P<inner>.*?)\s*-?\}\}", re.DOTALL)
_COMMENT = re.compile(r"/\*.*\*/", re.DOTALL)
_VALUE = re.compile(r"\.(?P<root>Values|Release|Chart)(?P<path>(?:\.[A-Za-z_]\w*)+)(?P<pipes>(?:\s*\|\s*[^|]+)*)")
_DEFAULT = re.compile(r"default\s+(?P<value>\"[^\"]*\"|[\w.:/-]+)")
_QUOTES = {"quote", "squote"}
_SAME = {"int", "int64", "toString", "trim"}


def is_plain(text: str) -> bool:
    """Whether it has values to fill in, and no conditions, loops or functions besides."""
    actions = [match["inner"] for match in _ACTION.finditer(text)]
    return bool(actions) and all(_COMMENT.fullmatch(one) or _parts(one) is not None for one in actions)


def fill_plain(text: str, values: Mapping[str, Any], source: str) -> tuple[str, list[Problem]]:
    """`text` with the values in it, and what was settled by a default.

    Args:
        values: as in a values.yaml; below `Release` and `Chart` those of the release.

    Raises:
        ConfigError: a value is missing; names each.
    """
    missing: list[Problem] = []
    notes: list[Problem] = []

    def value_of(match: re.Match[str]) -> str:
        if _COMMENT.fullmatch(match["inner"]):
            return ""
        parts = _parts(match["inner"])
        assert parts is not None, "the caller has asked is_plain"
        name, pipes = parts
        value: Any = values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        default = next((found["value"] for pipe in pipes if (found := _DEFAULT.fullmatch(pipe))), None)
        line = text.count("\n", 0, match.start()) + 1
        hint = f"give it with --set {name}=VALUE, or those of a chart with --values FILE"
        if value in (None, "") and default is not None:
            value = default.strip('"')
            notes.append(Problem(f"its default {value!r} is taken", name, source, line, hint))
        if value is None or isinstance(value, Mapping | list):
            missing.append(Problem(f"the template needs a value for {name}", "", source, line, hint))
            return ""
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        for pipe in pipes:
            if pipe == "quote":
                shown = json.dumps(shown)
            elif pipe == "squote":
                shown = "'" + shown.replace("'", "''") + "'"
        return shown

    filled = _ACTION.sub(value_of, text)
    if missing:
        raise ConfigError(list(dict.fromkeys(missing)))
    return filled, notes


def _parts(action: str) -> tuple[str, list[str]] | None:
    """Name of the value and what it goes through; None where that is more than a value."""
    match = _VALUE.fullmatch(action)
    if match is None:
        return None
    pipes = [pipe.strip() for pipe in match["pipes"].split("|")[1:]]
    if not all(pipe in _QUOTES or pipe in _SAME or _DEFAULT.fullmatch(pipe) for pipe in pipes):
        return None
    path = match["path"].removeprefix(".")
    return (path if match["root"] == "Values" else f"{match['root']}.{path}"), pipes
