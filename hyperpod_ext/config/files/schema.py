"""JSON schema of a spec, for completion and checks in editors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_args

from pydantic import BaseModel

from hyperpod_ext.config.files.field_docs import description, fields_of


def json_schema(model: type[BaseModel]) -> dict[str, object]:
    """Return the JSON schema of `model`, with docstrings of fields as descriptions."""
    generated = model.model_json_schema()
    definitions = generated.get("$defs", {})
    for found in _models_of(model, set()):
        schema = generated if found is model else definitions[found.__name__]
        for name, field in schema.get("properties", {}).items():
            text = description(found, name)
            of_type = definitions.get(field.get("$ref", "").rpartition("/")[2], {}).get("description")
            if text and text != of_type:  # without a description here, editors show the description of the field's type
                schema["properties"][name] = dict(sorted((field | {"description": text}).items()))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": model.__name__}
    return head | {key: value for key, value in generated.items() if key not in head}


def _models_of(model: type, seen: set[type]) -> Iterator[type]:
    """Yield `model` and every model and dataclass in its fields, each of them once."""
    if model in seen:
        return
    seen.add(model)
    yield model
    pending: list[Any] = list(fields_of(model).values())
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
            yield from _models_of(annotation, seen)
        else:
            pending += get_args(annotation)
