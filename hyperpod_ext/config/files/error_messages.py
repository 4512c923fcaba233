"""Translates pydantic's errors into messages with hints."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from hyperpod_ext.config.files.document import Document, Path, dotted
from hyperpod_ext.config.files.nearest import nearest
from hyperpod_ext.config.files.schema_path import Expected, expected_at, kinds_of, meant_by
from hyperpod_ext.errors import Problem

NO_FIELD = "is not a known field"
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_QUOTED = re.compile(r"'([^']*)'")


def problems_of(error: ValidationError, model: type[BaseModel], source: str, data: object) -> Iterator[Problem]:
    """Translate pydantic's errors to problems. `data` was not read from a file, so the problems have no lines."""
    document = Document(source, data)
    for one in error.errors(include_url=False):
        yield replace(translate(one, model, document), line=None)


def translate(error: Mapping[str, Any], model: type[BaseModel], document: Document) -> Problem:
    """Return one pydantic error as a Problem with file, line and hint."""
    expected = expected_at(model, tuple(error["loc"]))
    path = expected.path
    if str(error["type"]).startswith("union_tag"):
        path = (*path, tag_field(error))
    place = document.location(path)
    message, hint = _explain(error, expected, place.text, model)
    return document.problem(path, message, _for_a_shell(path, hint) if place.source.startswith("--set ") else hint)


def in_words(error: Mapping[str, Any], model: type[BaseModel]) -> tuple[Path, str, str]:
    """Return path, message and hint for one pydantic error in a value that was not read from a document."""
    expected = expected_at(model, tuple(error["loc"]))
    return expected.path, *_explain(error, expected, None, model)


_WRITE = re.compile(r"write (?P<value>[\[\"].*?[\]\"])(?: in quotes)?")
"""Pattern for a hint that suggests a value in quotes or brackets of YAML."""


def _for_a_shell(path: Path, hint: str) -> str:
    """Return the hint for a `--set` option on the command line, with the quotes of YAML escaped for the shell."""
    if (found := _WRITE.fullmatch(hint)) is None:
        return hint
    return f"write --set {shlex.quote(dotted(path) + '=' + found['value'])}"


def tag_field(error: Mapping[str, Any]) -> str:
    """Return the name of the field that selects the member of a union, such as `kind`, from a pydantic error."""
    return str(error["ctx"]["discriminator"]).strip("'")


def valid_tags(error: Mapping[str, Any]) -> list[str]:
    """Return the valid values of the field that selects the member of a union, from a pydantic error."""
    return _QUOTED.findall(error["ctx"]["expected_tags"])


def _explain(
    error: Mapping[str, Any], expected: Expected, written: str | None, model: type[BaseModel]
) -> tuple[str, str]:
    """Return the message and the hint for one pydantic error. The hint may be empty."""
    value, context = error["input"], error.get("ctx", {})
    kind = str(error["type"])
    match kind:
        case "extra_forbidden":
            return NO_FIELD, _hint_for_unknown(expected, model)
        case "missing":
            example = f"add `{expected.path[-1]}: {_plain(expected.examples[0])}`" if expected.examples else ""
            return f"is missing: {_sentence(expected.description)}", example
        case "union_tag_not_found":
            return "is missing", _hint_for_kind(value, expected, tag_field(error))
        case "union_tag_invalid":
            return f"{_shown(value.get(tag_field(error)))} is not a valid kind", _hint_for_choice(
                context["tag"], valid_tags(error)
            )
        case "literal_error":
            return f"{_shown(value)} is not a valid value", _hint_for_choice(
                str(value), _QUOTED.findall(context["expected"])
            )
        case "string_pattern_mismatch":
            return _of_pattern(value, context["pattern"], expected)
        case "string_too_long":
            return f"has {len(value)} characters", f"at most {context['max_length']} are allowed"
        case "too_long":
            return f"has {len(value)} entries", f"at most {context['max_length']} are allowed"
        case "string_too_short" | "too_short":
            return f"is empty: {_sentence(expected.description)}", ""
        case "int_type" | "int_from_float" | "float_type":
            what = "a number" if kind == "float_type" else "a whole number"
            return f"must be {what}, not {named(value)}", _hint_for_number(value, _most(expected), expected.path)
        case "string_type":
            return f"must be text, not {named(value)}", _hint_for_text(value, written)
        case "bool_type":
            return f"must be true or false, not {named(value)}", _hint_for_bool(value)
        case "tuple_type" | "list_type":
            return f"must be a list, not {named(value)}", _hint_for_list(value)
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"must be a mapping, not {named(value)}", _hint_for_fields(value, expected)
        case "value_error":
            text = str(context["error"])  # the text from our validator; pydantic's own text begins with "Value error"
            found = re.fullmatch(r"(.+); ((?:add|keep|remove|use|write) .+)", text, re.DOTALL)
            return (found[1], found[2]) if found else (text, "")
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        bound = context[key]
        if kind == "greater_than" and isinstance(value, int):
            words, bound = "at least", bound + 1
        return f"{_shown(value)} is out of range", f"it must be {words} {bound}"
    return str(error["msg"]), ""


def _hint_for_unknown(expected: Expected, model: type[BaseModel]) -> str:
    """Return a hint for an unknown field. The hint names the same field in another section, or the most similar field
    of the section, or all fields of the section."""
    names = expected.holder.model_fields if expected.holder else {}
    meant, elsewhere = meant_by(str(expected.path[-1]), names, model)
    if elsewhere is not None:
        return f"did you mean `{dotted(elsewhere)}`?"
    return f"did you mean `{meant}`?" if meant else f"valid: {', '.join(names)}" if names else ""


def _hint_for_kind(value: object, expected: Expected, tag: str) -> str:
    """Return a hint for an entry without its kind: the only kind that has all fields of the entry, or all kinds."""
    kinds = kinds_of(expected.models, tag)
    given = set(value) if isinstance(value, dict) else set()
    fitting = [kind for kind, member in kinds.items() if given and given <= set(member.model_fields)]
    return f"add `{tag}: {fitting[0]}`" if len(fitting) == 1 else f"add `{tag}`, one of {', '.join(kinds)}"


def _hint_for_choice(value: str, valid: list[str]) -> str:
    found = nearest(value, valid)
    listed = ", ".join(valid)
    return f"did you mean `{found}`? valid: {listed}" if found and len(valid) > 1 else f"valid: {listed}"


def _of_pattern(value: str, pattern: str, expected: Expected) -> tuple[str, str]:
    """Return the message and the hint for a value that does not match `pattern`."""
    for start, form in (("/", "an absolute path"), ("s3://", "an S3 URI")):
        if value and "://" not in value and re.fullmatch(pattern, f"{start}{value}"):
            return f"{_shown(value)} is not {form}", f"write a value that begins with {start}, such as {start}{value}"
    if pattern.startswith("^s3://"):
        bucket = value.removeprefix("s3://").partition("/")[0]
        if not value.startswith("s3://") or not bucket:
            return f"{_shown(value)} is not an S3 URI", "write s3://bucket/prefix"
        if not re.fullmatch(pattern, f"s3://{bucket}"):
            hint = "write 3 to 63 lower-case letters, digits, dots or dashes, with a letter or digit at both ends"
            return f"{_shown(bucket)} is not a valid name of a bucket", hint
    what = "the name " if expected.is_key else ""
    message = f"{what}{_shown(value)} does not have the right form: {_sentence(expected.description)}"
    return message, _hint_for_pattern(value, pattern, expected)


def _hint_for_pattern(value: str, pattern: str, expected: Expected) -> str:
    """Return a hint with a value that is similar to `value` and matches `pattern`, or with an example."""
    for separator, text in (("-", value.lower()), ("_", value.upper())):
        candidate = re.sub(r"[^A-Za-z0-9]+", separator, text).strip(separator)
        if candidate and re.fullmatch(pattern, candidate):
            return f"for example `{candidate}`"
    return f"such as {_plain(expected.examples[0])}" if expected.examples else ""


_BEYOND_ANY_LIMIT = 1e12
"""Hints suggest no number above this one, because no field accepts such numbers."""


def _most(expected: Expected) -> float:
    """Return the largest number that the field accepts; `_BEYOND_ANY_LIMIT` if the field has no maximum."""
    info = expected.holder.model_fields.get(str(expected.path[-1])) if expected.holder and expected.path else None
    limits = [limit.le for limit in (info.metadata if info else ()) if getattr(limit, "le", None) is not None]
    return min(limits, default=_BEYOND_ANY_LIMIT)


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]+)")


def _in_unit_of(name: str, text: str) -> str | None:
    """Convert an amount with a unit to the unit that a field's name ends in: `_s` for seconds, `_mib` for MiB. None if
    `text` is no such amount."""
    if (found := _AMOUNT.fullmatch(text.strip())) is None:
        return None
    number, unit = float(found["number"]), found["unit"]
    if name.endswith("_s") and (each := _SECONDS.get(unit)):
        return f"{math.ceil(number * each)}, which is {text.strip()} in seconds"
    if name.endswith("_mib") and (size := re.fullmatch(r"([KkMGT])(i?)B?", unit)):
        each = (1024 if size[2] else 1000) ** ("KMGT".index(size[1].upper()) + 1)
        return f"{math.ceil(number * each / 1024**2)}, which is {text.strip()} in MiB"
    return None


def _hint_for_number(value: object, most: float, path: Path) -> str:
    if isinstance(value, str) and path and (amount := _in_unit_of(str(path[-1]), value)):
        return f"write {amount}"
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
        return "write each item on a separate line that starts with `- `"
    if value is None:
        return "write [] for an empty list"
    try:
        items = shlex.split(value) if isinstance(value, str) else [value]
    except ValueError:  # unbalanced quotes: treat the text as one item
        items = [value]
    return f"write {json.dumps(items)}"


def _hint_for_fields(value: object, expected: Expected) -> str:
    members = expected.models
    if len(members) > 1:
        kinds = kinds_of(members, "kind")
        if isinstance(value, str):
            if found := nearest(value, kinds):
                return f"write `{{kind: {found}}}`" if found == value else f"did you mean `{{kind: {found}}}`?"
            if found := _as_the_one_field(value, kinds):
                return f"write `{found}`"
        at_path = isinstance(value, str) and value[:1] == "/" and all("path" in one.model_fields for one in members)
        entry = f"{{kind: ..., path: {value}}}" if at_path else "{kind: ...}"
        return f"write `{entry}` with one of the kinds {', '.join(kinds)}"
    if members:
        return f"valid: {', '.join(members[0].model_fields)}"
    return "write one `NAME: value` per line"


def _as_the_one_field(value: str, kinds: Mapping[str, type[BaseModel]]) -> str | None:
    """Return the entry that the user probably meant with the text `value`, such as `{kind: s3, uri: s3://bkt/p}` for
    `s3://bkt/p`. None if several fields look like `value`, or if the kind also requires other fields."""
    found = [
        (kind, name, member)
        for kind, member in kinds.items()
        for name, info in member.model_fields.items()
        if info.examples and "/" in value and str(info.examples[0]).partition("/")[0] == value.partition("/")[0]
    ]
    names = {name for _, name, _ in found}
    if len(names) != 1 or sum(info.is_required() for info in found[0][2].model_fields.values()) != 1:
        return None
    return f"{{kind: {found[0][0]}, {found[0][1]}: {value}}}"


def named(value: object) -> str:
    """Return the value with its type in words, for an error message, such as `the number 2`."""
    match value:
        case None:
            return "an empty value"
        case bool():
            return f"`{_plain(value)}`, a true/false value"
        case int() | float():
            return f"the number {_plain(value)}"
        case str():
            return f"the text {_shown(value)}"
        case list():
            return "a list"
    return "a mapping"


def _shown(value: object) -> str:
    text = _plain(value)
    return f"`{text[:60]}...`" if len(text) > 60 else f"`{text}`"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _sentence(description: str) -> str:
    """Return the first sentence of a field's documentation, for an error message."""
    first = re.split(r"(?<=[^.\s])\.(?:\s|$)", " ".join(description.split()), maxsplit=1)[0]
    return first or "it is required"
