"""Placeholders of templates and their values. All functions except `read_values` are pure.

Placeholders are `$NAME` and `${NAME}` as in envsubst, and Jinja's `{{ NAME }}`. A Helm template is refused; the error
contains the command that renders it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ext.config.files.document import parse
from hyperpod_ext.config.files.load import text_of
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.imports.how import HOW

VARIABLE = re.compile(r"(?<!\$)\$(?:\{(\w+)(?::?-([^{}]*))?\}|([A-Za-z_]\w*))")
"""Pattern of a shell variable, such as `$NAME` or `${NAME}`, optionally with a default, as in `${NAME:-DEFAULT}`."""
_HELM = re.compile(
    r"""\{\{(?:(?:"[^"{}\n]*"|[^{}"'])*[\s(])?[.$]"""  # e.g. {{ quote .Values.name }}, {{ $config.name }}
    r"""|\{\{-?\s*(?:/\*|(?:if|range|with|block|define|template)\s+["\w])"""
)
"""Pattern of a template action that only Helm supports, not Jinja."""
_JINJA = re.compile(r"\{\{|\{%")


def read_values(sets: Iterable[str], values_file: str | None, env_file: str | None) -> dict[str, Any]:
    """Read the values of placeholders from `--values`, `--env-file` and `--set`.

    `--env-file` overrides `--values`, and `--set` overrides both.

    Raises:
        ConfigError: a file or a `--set` option has the wrong form.
        NotFoundError: a file does not exist.
    """
    found: dict[str, Any] = {}
    if values_file is not None:
        document = parse(text_of(values_file), values_file)
        if document.problems or not isinstance(document.data, dict):
            hint = "write one `NAME: value` per line"
            raise ConfigError(document.problems or [Problem("contains no values", source=values_file, hint=hint)])
        found |= document.data
    if env_file is not None:
        found |= _read_env(text_of(env_file), env_file)
    for one in sets:
        name, equals, value = one.partition("=")
        if not equals or not name:
            hint = "write --set NUM_NODES=4"
            raise ConfigError([Problem("is not of the form NAME=VALUE", source=f"--set {one}", hint=hint)])
        holder = found
        *outer, last = name.split(".")
        for part in outer:
            below = holder.get(part)
            holder[part] = below = below if isinstance(below, dict) else {}
            holder = below
        holder[last] = value
    return found


def helm_refused(source: str, chart: str, file: str = "", line: int | None = None) -> ConfigError:
    """Return the error for a Helm chart, or for one template of a Helm chart.

    Args:
        source: name of the imported file or folder for the message.
        chart: folder of the chart, for the helm command in the hint.
        file: path of the template in the chart; empty for the whole chart.
        line: line of the template that only helm can render.
    """
    only = f" --show-only {file}" if file else ""
    hint = f"import the output of helm: helm template NAME {chart}{only} | hp-ext import -"
    return ConfigError([Problem("belongs to a Helm chart, and only helm can render it", "", source, line, hint)])


def fill(text: str, values: Mapping[str, Any], source: str) -> tuple[str, list[Problem]]:
    """Return the filled `text`, and a note for each default that was used.

    Args:
        source: name of the file for messages.

    Raises:
        ConfigError: the text is a Helm template, or a Jinja template that lacks values or is outside the safe subset.
    """
    notes: list[Problem] = []
    if helm := _HELM.search(text):
        line = text.count("\n", 0, helm.start()) + 1
        folder, name = Path(source).parent, Path(source).name
        if folder.name != "templates":
            raise helm_refused(source, "CHART", line=line)
        raise helm_refused(source, shlex.quote(str(folder.parent)), shlex.quote(f"templates/{name}"), line)
    if _JINJA.search(text):
        from hyperpod_ext.jobs.imports.jinja import fill_jinja

        text, notes = fill_jinja(text, values, source)

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        value = values.get(name)
        if value is None or isinstance(value, dict | list):
            # keep `$NAME` if it has no default, or if the file itself sets the container's variable NAME
            if match[2] is None or f"name: {name}\n" in text:
                return match[0]
            line = text.count("\n", 0, match.start()) + 1
            notes.append(Problem(f"its default {match[2]!r} is used", name, source, line, HOW.format(name=name)))
            return match[2]
        return str(value)

    filled = VARIABLE.sub(value_of, text)
    for name, value in values.items():
        if isinstance(value, str | int | float):
            filled = filled.replace(f"<{name}>", str(value))
    return filled, notes


def names_in(text: str) -> Iterator[str]:
    """Yield the names of the shell variables in `text`."""
    for match in VARIABLE.finditer(text):
        yield match[1] or match[3]


def _read_env(text: str, source: str) -> dict[str, str]:
    """Parse lines `NAME=value` or `export NAME=value` as a shell does. A value may use variables of earlier lines."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            wrong = f"is not a line NAME=value: {error}"
            raise ConfigError([Problem(wrong, source=source, line=number)]) from None
        for word in words:
            name, equals, value = word.partition("=")
            if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
                found[name] = VARIABLE.sub(lambda match: found.get(match[1] or match[3], match[2] or match[0]), value)
    return found
