"""pydantic's errors in plain words: what is wrong, and for each one what to write instead."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from hyperpod_ext.config.files.document import Document, Path, dotted
from hyperpod_ext.config.files.nearest import nearest, suggest
from hyperpod_ext.config.files.schema_path import Expected, expected_at, field_paths
from hyperpod_ext.errors import Problem

_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_QUOTED = re.compile(r"'([^']*)'")


def translate(error: Mapping[str, Any], model: type[BaseModel], document: Document) -> Problem:
    """One pydantic error as a Problem with file, line and hint."""
    expected = expected_at(model, tuple(error["loc"]))
    path = expected.path
    if str(error["type"]).startswith("union_tag"):
        path = (*path, tag_field(error))
    place = document.location(path)
    message, hint = _explain(error, expected, place.text, model)
    return document.problem(path, message, _for_a_shell(path, hint) if place.source.startswith("--set ") else hint)


_WRITE = re.compile(r"write (?P<value>[\[\"].*?[\]\"])(?: in quotes)?")
"""A hint that says what to write, where that has quotes of YAML."""


def _for_a_shell(path: Path, hint: str) -> str:
    """The same hint where the value came from an option: a shell takes away the quotes that YAML needs."""
    if (found := _WRITE.fullmatch(hint)) is None:
        return hint
    return f"write --set {shlex.quote(dotted(path) + '=' + found['value'])}"


def tag_field(error: Mapping[str, Any]) -> str:
    """The field that tells the members of a union apart, `kind`."""
    return str(error["ctx"]["discriminator"]).strip("'")


def valid_tags(error: Mapping[str, Any]) -> list[str]:
    """What `tag_field` may be."""
    return _QUOTED.findall(error["ctx"]["expected_tags"])


def _explain(
    error: Mapping[str, Any], expected: Expected, written: str | None, model: type[BaseModel]
) -> tuple[str, str]:
    """Message and hint."""
    value, context = error["input"], error.get("ctx", {})
    kind = str(error["type"])
    match kind:
        case "extra_forbidden":
            return "is not a field here", _hint_for_unknown(expected, model)
        case "missing":
            example = f"add `{expected.path[-1]}: {_plain(expected.examples[0])}`" if expected.examples else ""
            return f"is missing: {_sentence(expected.description)}", example
        case "union_tag_not_found":
            return "is missing: it says which kind of entry this is", "add `kind: ...`, as in `kind: memory`"
        case "union_tag_invalid":
            return f"{_shown(value.get(tag_field(error)))} is not one of its kinds", _hint_for_choice(
                context["tag"], valid_tags(error)
            )
        case "literal_error":
            return f"{_shown(value)} is not one of its choices", _hint_for_choice(
                str(value), _QUOTED.findall(context["expected"])
            )
        case "string_pattern_mismatch":
            what = "the name " if expected.is_key else ""
            return (
                f"{what}{_shown(value)} does not have the right form: {_sentence(expected.description)}",
                _hint_for_pattern(value, context["pattern"]),
            )
        case "string_too_short" | "too_short":
            return f"is empty: {_sentence(expected.description)}", ""
        case "int_type" | "int_from_float" | "float_type":
            return f"a whole number belongs here, not {_named(value)}", _hint_for_number(value, _most(expected))
        case "string_type":
            return f"text belongs here, not {_named(value)}", _hint_for_text(value, written)
        case "bool_type":
            return f"true or false belongs here, not {_named(value)}", _hint_for_bool(value)
        case "tuple_type" | "list_type":
            return f"a list belongs here, not {_named(value)}", _hint_for_list(value)
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"fields belong here, not {_named(value)}", _hint_for_fields(value, expected)
        case "value_error":
            return str(context["error"]), ""  # pydantic's own text begins with "Value error"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        bound = context[key]
        if kind == "greater_than" and isinstance(value, int):
            words, bound = "at least", bound + 1
        return f"{_shown(value)} is out of range", f"it must be {words} {bound}"
    return str(error["msg"]), ""


def _hint_for_unknown(expected: Expected, model: type[BaseModel]) -> str:
    """The same name elsewhere in the file, then the nearest name here, then all names here."""
    path, name = expected.path, str(expected.path[-1])
    for other in field_paths(model):
        if other[-1] == name and other != path:
            return f"did you mean `{dotted(other)}`?"
    return suggest(name, expected.holder.model_fields if expected.holder else ())


def _hint_for_choice(value: str, valid: list[str]) -> str:
    found = nearest(value, valid)
    listed = ", ".join(valid)
    return f"did you mean `{found}`? valid: {listed}" if found and len(valid) > 1 else f"valid: {listed}"


def _hint_for_pattern(value: str, pattern: str) -> str:
    """The value made to fit, where that is easy."""
    for separator, text in (("-", value.lower()), ("_", value.upper())):
        candidate = re.sub(r"[^A-Za-z0-9]+", separator, text).strip(separator)
        if candidate and re.fullmatch(pattern, candidate):
            return f"`{candidate}` would do"
    return ""


_BEYOND_ANY_LIMIT = 1e12
"""Whoever writes such a number is not helped by the same one written out: no field takes it."""


def _most(expected: Expected) -> float:
    """The largest number that the field takes."""
    info = expected.holder.model_fields.get(str(expected.path[-1])) if expected.holder and expected.path else None
    limits = [limit.le for limit in (info.metadata if info else ()) if getattr(limit, "le", None) is not None]
    return min(limits, default=_BEYOND_ANY_LIMIT)


def _hint_for_number(value: object, most: float) -> str:
    if isinstance(value, float) and value > most < _BEYOND_ANY_LIMIT:
        return f"write digits only, at most {most}"
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d+\s*", value):
        return f"write {value.strip()} without quotes"
    if isinstance(value, float) and value.is_integer() and abs(value) <= most:
        return f"write {int(value)}"
    return "write digits only, such as 2"


def _hint_for_text(value: object, written: str | None) -> str:
    if isinstance(value, bool | int | float):
        return f'write "{written if written is not None else _plain(value)}" in quotes'
    return 'write it in quotes, such as "text"'


def _hint_for_bool(value: object) -> str:
    words = {"true": "true", "yes": "true", "on": "true", "1": "true"}
    words |= {"false": "false", "no": "false", "off": "false", "0": "false"}
    meant = words.get(str(value).lower())
    return f"write {meant} without quotes" if meant else "write true or false"


def _hint_for_list(value: object) -> str:
    if isinstance(value, dict):
        return "start each item on a line of its own with `- `"
    if value is None:
        return "write [] for an empty list"
    try:
        items = shlex.split(value) if isinstance(value, str) else [value]
    except ValueError:  # unbalanced quotes: one item then
        items = [value]
    return f"write {json.dumps(items)}"


def _hint_for_fields(value: object, expected: Expected) -> str:
    members = expected.models
    if len(members) > 1:
        kind = value if isinstance(value, str) else "..."
        return f"write `kind: {kind}`"
    if members:
        return f"valid: {', '.join(members[0].model_fields)}"
    return "write one `NAME: value` a line"


def _named(value: object) -> str:
    """The value with what it is, for a message."""
    match value:
        case None:
            return "nothing"
        case bool():
            return f"{_plain(value)}, which is true/false"
        case int() | float():
            return f"the number {_plain(value)}"
        case str():
            return f"the text {_shown(value)}"
        case list():
            return "a list"
    return "fields"


def _shown(value: object) -> str:
    text = _plain(value)
    return f"`{text[:60]}...`" if len(text) > 60 else f"`{text}`"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _sentence(description: str) -> str:
    """The first sentence of a field's documentation, to go into a message."""
    first = re.split(r"(?<=[^.\s])\.(?:\s|$)", " ".join(description.split()), maxsplit=1)[0]
    return first or "it must be given"
