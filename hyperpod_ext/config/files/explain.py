"""Explains the fields of a spec from the spec's pydantic model, for `hp-ext explain`."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hyperpod_ext.config.files.field_docs import description
from hyperpod_ext.config.files.nearest import suggest
from hyperpod_ext.config.files.schema_path import annotation_of, item_type, kinds_of, models_in
from hyperpod_ext.errors import NotFoundError


def explain(model: type[BaseModel], path: str) -> dict[str, Any]:
    """Return description, type, default, example and inner fields of the field at the dotted `path`. An empty `path`
    stands for the spec itself.

    Indices of list items in `path` are optional. If a field is a union of models, the next name is looked up in every
    model of the union.

    Raises:
        NotFoundError: the spec has no field `path`. The hint has the most similar name.
    """
    holders: list[type[BaseModel]] = [model]
    walked: list[str] = []
    asked: list[type[BaseModel]] = []
    for part in [one for one in path.split(".") if one and not one.isdecimal()]:
        names = [name for holder in holders for name in holder.model_fields]
        asked = [one for one in holders if part in one.model_fields]
        if not asked:
            place = f"`{'.'.join(walked)}`" if walked else "the spec"
            raise NotFoundError(f"{place} has no field `{part}`", hint=suggest(part, dict.fromkeys(names)))
        walked.append(part)
        holders = _models_below(annotation_of(asked[0].model_fields[part]))
    below = list(dict.fromkeys(name for holder in holders for name in holder.model_fields))
    if not asked:
        of_model = {"path": model.__name__, "description": _words(model.__doc__)}
        return of_model | {"type": None, "default": None, "example": None, "fields": below}
    holder, info = asked[0], asked[0].model_fields[walked[-1]]
    if len(asked) > 1 and get_origin(info.annotation) is Literal:
        kinds = kinds_of(asked, walked[-1])
        each = " ".join(f"{kind}: {_words(member.__doc__)}" for kind, member in kinds.items())
        shown = {"path": ".".join(walked), "description": f"Kind of the entry. {each}"}
        return shown | {"type": " | ".join(kinds), "default": None, "example": None, "fields": []}
    default = info.default
    return {
        "path": ".".join(walked),
        "description": _words(description(holder, walked[-1])),
        "type": _type_of(info),
        "default": None if default is PydanticUndefined or isinstance(default, BaseModel) else _shown(default),
        "example": _shown(info.examples[0]) if info.examples else None,
        "fields": below,
    }


def _models_below(annotation: Any) -> list[type[BaseModel]]:
    while annotation is not None:
        if found := models_in(annotation):
            return found
        annotation = item_type(annotation)
    return []


def _type_of(info: FieldInfo) -> str:
    """Return the type of a field as text, from the JSON schema of the field."""
    schema = TypeAdapter(info.rebuild_annotation()).json_schema()
    if callable(info.json_schema_extra):
        info.json_schema_extra(schema)
    return _named(schema)


def _named(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_named(one) for one in schema.get("anyOf") or schema["oneOf"]]
        return " | ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "$ref" in schema:
        return "fields"
    if schema.get("type") == "array":
        return f"list of {_named(schema.get('items', {}))}"
    words = {"integer": "whole number", "string": "text", "boolean": "true | false", "object": "fields"}
    name = words.get(str(schema.get("type")), str(schema.get("type", "any")))
    if "pattern" in schema:
        return f"{name} like {schema['pattern']}"
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return " ".join([name, *(f"{sign} {schema[key]}" for key, sign in bounds.items() if key in schema)])


def _words(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=lambda one: one.model_dump(mode="json"))
