"""An example value of every field of a spec.

The value is the first of: a value in `example_values`, an example in the model, a value in a spec below examples/, the
default, and a value that the field's type allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from annotated_types import Ge, Gt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from generator.example_values import KEYS, ONE_OF, known
from hyperpod_ext.config.files.schema_path import annotation_of, item_type, models_in

ROOT = Path(__file__).resolve().parents[2]
Models = tuple[type[BaseModel], ...]


def example(spec: str, models: Models, path: tuple[str, ...], above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a section of `models` in which the field at `path` has an example value. Required fields of
    the same section are included, except at the root of a spec."""
    name, below = path[0], path[1:]
    model = next(one for one in models if name in one.model_fields)
    dotted = (*above, name)
    if below:
        shape = Shape.of(annotation_of(model.model_fields[name]))
        inner = shape.around(example(spec, shape.models, below, dotted), KEYS.get(".".join(dotted), "data"))
    else:
        inner = value(spec, model.model_fields[name], dotted)
    return (_required(spec, model, above, name) if above else {}) | {name: inner}


def _required(spec: str, model: type[BaseModel], above: tuple[str, ...], shown: str = "") -> dict[str, Any]:
    """Return examples of the fields of a section that an example of the field `shown` needs."""
    one_of = ONE_OF.get(".".join(above), {})
    needed = {} if shown in one_of else dict(list(one_of.items())[:1])
    return needed | {
        name: value(spec, info, (*above, name))
        for name, info in model.model_fields.items()
        if info.is_required() or (name == "kind" and get_origin(info.annotation) is Literal)
    }


class Shape:
    """Lists and mappings around the models in a type."""

    def __init__(self, models: Models, containers: tuple[type, ...]) -> None:
        self.models, self.containers = models, containers

    @classmethod
    def of(cls, annotation: Any) -> Shape:
        """Return the shape of a type."""
        containers: list[type] = []
        while annotation is not None:
            if found := models_in(annotation):
                return cls(tuple(found), tuple(containers))
            if kind := _container(annotation):
                containers.append(kind)
            annotation = item_type(annotation)
        return cls((), tuple(containers))

    def around(self, item: Any, key: str = "data") -> Any:
        """Return `item` in these lists and mappings. A mapping has one entry, with the key `key`."""
        for kind in reversed(self.containers):
            item = {key: item} if kind is dict else [item]
        return item


def _container(annotation: Any) -> type | None:
    origin = get_origin(annotation)
    if origin in (tuple, list):
        return list
    if origin is dict:
        return dict
    return next((found for one in get_args(annotation) if (found := _container(one))), None)


def value(spec: str, info: FieldInfo, path: tuple[str, ...]) -> Any:
    """Return an example value of one field."""
    dotted = ".".join(path)
    if (listed := known(spec, dotted)) is not None:
        return listed
    if info.examples:
        return info.examples[0]
    if get_origin(info.annotation) is Literal:
        return get_args(info.annotation)[0]
    shape = Shape.of(annotation_of(info))
    if dotted in (written := in_examples(spec)):
        return written[dotted]
    if shape.models:
        model = shape.models[0]
        first = next(iter(model.model_fields))
        return shape.around(
            _required(spec, model, path) or {first: value(spec, model.model_fields[first], (*path, first))}
        )
    default = info.default
    if default not in (None, PydanticUndefined, "", (), {}):
        return default if isinstance(default, str | int | float | bool) else list(default)
    return _of_type(info.annotation, info.metadata)


def _of_type(annotation: Any, metadata: list[Any]) -> Any:
    """Return a value that a type allows."""
    metadata = [*metadata, *getattr(annotation, "__metadata__", ())]
    arguments = [one for one in get_args(annotation) if one is not type(None)]
    if get_origin(annotation) is Literal:
        return arguments[0]
    if (kind := _container(annotation)) and get_origin(annotation) in (tuple, list, dict):
        return {} if kind is dict else [_of_type(arguments[0], [])]
    if arguments:
        return _of_type(arguments[0], metadata)
    least = next((_least(one) for one in metadata if isinstance(one, Gt | Ge)), 1)
    plain: dict[Any, Any] = {bool: True, int: least, float: float(least)}
    return plain.get(annotation, "a")


def _least(bound: Any) -> Any:
    return bound.gt + 1 if isinstance(bound, Gt) else bound.ge


@cache
def in_examples(spec: str) -> Mapping[str, Any]:
    """Return the first value of each field in the specs below examples/, by the field's dotted path."""
    files = sorted((ROOT / "examples").glob("*/*.yaml"))
    found: dict[str, Any] = {}
    for file in files:
        written = yaml.safe_load(file.read_text())
        if ("instance_groups" in written) == (spec == "cluster"):
            for path, one in _walk(written, ()):
                found.setdefault(".".join(path), one)
    return found


def _walk(written: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(written, list):
        for one in written:
            yield from _walk(one, path)
    elif isinstance(written, dict):
        for name, one in written.items():
            yield (*path, name), one
            yield from _walk(one, (*path, name))
