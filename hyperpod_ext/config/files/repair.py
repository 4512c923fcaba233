"""Repairs an invalid document step by step, to find further mistakes.

A misspelt name is replaced by the most similar valid name. An invalid value is replaced by the field's default or
example. `repair` returns the path of each replaced value, because later checks must not read a replaced value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

from hyperpod_ext.config.base import ContradictionError
from hyperpod_ext.config.files.document import Document, Path
from hyperpod_ext.config.files.error_messages import tag_field, valid_tags
from hyperpod_ext.config.files.nearest import nearest
from hyperpod_ext.config.files.schema_path import expected_at, kinds_of, meant_by


def repair(error: Mapping[str, Any], model: type[BaseModel], document: Document) -> Path | None:
    """Repair `document` at the path of one pydantic error.

    Returns:
        The path of a value that was replaced or removed; None if the repair kept the user's value.
    """
    expected = expected_at(model, tuple(error["loc"]))
    path, kind = expected.path, error["type"]
    if kind == "extra_forbidden":
        names = expected.holder.model_fields if expected.holder else ()
        return _rename_or_drop(document, path, names, model)
    if kind == "missing":
        if expected.examples and isinstance(holder := _value_at(document.data, path[:-1]), dict):
            holder[path[-1]] = expected.examples[0]
        return path
    contradiction = error.get("ctx", {}).get("error")
    if isinstance(contradiction, ContradictionError) and contradiction.field is not None:
        return _drop(document, (*path, contradiction.field))
    if kind == "union_tag_invalid":
        meant = nearest(str(error["ctx"]["tag"]), valid_tags(error))
        entry = _value_at(document.data, path)
        if meant and isinstance(entry, dict):
            entry[tag_field(error)] = meant
            return (*path, tag_field(error))
    read = _reading(error, expected.models)
    holder = _value_at(document.data, path[:-1])
    if read is not None and isinstance(holder, dict | list):
        holder[path[-1]] = read  # type: ignore[index]  # a key or an index
        return None
    return _drop(document, path)


def _reading(error: Mapping[str, Any], members: tuple[type[BaseModel], ...]) -> object:
    """Return the obvious meaning of a value of the wrong type, such as 2 for `"2"`, or `kind: memory` for `memory`.
    None if the value has no obvious meaning."""
    value = error["input"]
    if not isinstance(value, str):
        return None
    if error["type"] == "int_type" and re.fullmatch(r"-?[0-9]{1,9}", value):
        return int(value)
    meant = nearest(value, kinds_of(members, "kind")) if len(members) > 1 else None
    return {"kind": meant} if meant else None


def overlaps(path: Path, other: Path) -> bool:
    """Return whether `path` is inside `other`, or `other` inside `path`. `*` stands for any item."""
    return all(str(a) == str(b) or "*" in (a, b) for a, b in zip(path, other, strict=False))


def _rename_or_drop(document: Document, path: Path, names: Collection[str], model: type[BaseModel]) -> Path | None:
    name = str(path[-1])
    meant, elsewhere = meant_by(name, names, model)
    holder = _value_at(document.data, path[:-1])
    if not isinstance(holder, dict):
        return path
    value = holder.pop(path[-1], None)
    if meant is None:
        return elsewhere
    if meant not in holder:
        holder[meant] = value
        for place in [place for place in document.locations if place[: len(path)] == path]:
            document.locations[(*path[:-1], meant, *place[len(path) :])] = document.locations[place]
    return None


def _drop(document: Document, path: Path) -> Path:
    """Remove the field at `path`, and return its path. Items of lists are not removed singly, because the indices of
    other items would change; the field with the whole list is removed instead."""
    while path:
        holder = _value_at(document.data, path[:-1])
        if isinstance(holder, dict):
            holder.pop(path[-1], None)
            return path
        path = path[:-1]
    document.data = {}
    return path


def _value_at(data: Any, path: Path) -> object:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):  # an earlier repair has removed the value
            return None
    return data
