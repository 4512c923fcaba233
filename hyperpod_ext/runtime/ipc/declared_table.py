"""Generate the tables of message and event kinds for the docs: name, meaning, fields with type and unit, sender and
reader."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from hyperpod_ext.config.files.field_docs import description
from hyperpod_ext.runtime.ipc.declared import Declared, Kinds, Unit, fields_of, name_of

AnswerOf = Callable[[type[Any]], type[Declared]]

_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", dict: "object", Any: "any"}


def table(kinds: Kinds[Any], *common: str, answer_of: AnswerOf | None = None) -> str:
    """Return a markdown table with one row for each kind in `kinds`.

    Args:
        common: names of fields that all kinds have, and that the table leaves out.
        answer_of: function that returns the type of the answer to a kind of request; None for other messages.
    """
    head = ["name", "meaning", "fields", *(["answer"] if answer_of else []), "from", "to"]
    rows = [_row(kind, kinds.key, *common, answer_of=answer_of) for kind in kinds]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def _row(kind: type[Declared], key: str, *common: str, answer_of: AnswerOf | None) -> list[str]:
    fields = _fields(kind, key, *common)
    answer = [_fields(answer_of(kind))] if answer_of else []
    return [f"`{name_of(kind, key)}`", in_line(kind.__doc__), fields, *answer, kind.sender, kind.reader]


def _fields(kind: type[Declared], *exclude: str) -> str:
    return "<br>".join(fields_in_words(kind, *exclude)) or "none"


def fields_in_words(kind: type[Declared], *exclude: str) -> Iterator[str]:
    """Yield one text for each field of `kind` that is not in `exclude`. The text contains the field's name, type, unit
    and meaning, and whether the field is optional."""
    for name, annotation in fields_of(kind).items():
        if name in exclude:
            continue
        may = "" if kind.model_fields[name].is_required() else ", may be left out"
        meaning = in_line(description(kind, name))
        yield f"`{name}` ({type_in_words(annotation)}{may})" + (f": {meaning}" if meaning else "")


def type_in_words(annotation: Any) -> str:
    """Return a description of a declared type in terms of JSON, such as `list of integer`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        units = [extra.name for extra in arguments[1:] if isinstance(extra, Unit)]
        return ", in ".join([type_in_words(arguments[0]), *units])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" if value != "" else "empty" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if argument is types.NoneType else type_in_words(argument) for argument in arguments)
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return f"list of {type_in_words(arguments[0])}"
    if origin is tuple:
        return f"list: {', '.join(map(type_in_words, arguments))}"
    if origin is dict and arguments[1] is not Any:
        return f"object of {type_in_words(arguments[1])} by {type_in_words(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Declared):
        return f"object: {'; '.join(words.rstrip('.') for words in fields_in_words(annotation))}"
    return _NAMES.get(origin or annotation, str(annotation))


def in_line(text: str | None) -> str:
    """Return a docstring as a single line, with `|` escaped for a markdown table."""
    return " ".join((text or "").split()).replace("|", "\\|")
