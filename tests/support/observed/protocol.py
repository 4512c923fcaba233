"""Shapes of messages, events and outputs: names, fields, types, ranges, and which fields may be left out."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from command import OUTPUTS

from hyperpod_ext.runtime.ipc.declared import Declared
from observed.cli import Place
from observed.pool import ROOT

_CLASS = re.compile(r"^class (\w+)\(([^)]*)\)", re.MULTILINE)
_LARGE = 500
_RANGES = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def messages(_fast: bool) -> Iterator[tuple[str, Any]]:
    """Everything that our processes send to each other or write into the event log."""
    for module in _modules_with("Declared"):
        importlib.import_module(module)
    found: dict[str, list[Any]] = {}
    parts: dict[str, Any] = {}
    for kind in _kinds(Declared):
        found.setdefault(_name(kind), []).append(_described(kind, parts))
    yield from ((name, sorted(shapes, key=json.dumps)) for name, shapes in found.items())
    yield from parts.items()


def _modules_with(base: str) -> set[str]:
    """Modules that define a class below `base`, found in their text."""
    files = {file: file.read_text() for file in (ROOT / "hyperpod_ext").rglob("*.py")}
    classes = [(file, *found) for file, text in files.items() for found in _CLASS.findall(text)]
    names: set[str] = {base}
    while more := {name for _, name, bases in classes if names & set(re.findall(r"\w+", bases))} - names:
        names |= more
    chosen = [file.relative_to(ROOT).with_suffix("") for file, name, _ in classes if name in names]
    return {".".join(file.parts).removesuffix(".__init__") for file in chosen}


def _kinds(of: type[Declared]) -> Iterator[type[Declared]]:
    for kind in of.__subclasses__():
        if kind.__module__.startswith("hyperpod_ext."):
            if not kind.__subclasses__() or _key(kind):
                yield kind
            yield from _kinds(kind)


def _key(kind: type[Declared]) -> str:
    fields = kind.model_fields
    return next(
        (name for name in ("event", "type", "op") if name in fields and isinstance(fields[name].default, str)), ""
    )


def _name(kind: type[Declared]) -> str:
    if key := _key(kind):
        return f"{key} {kind.model_fields[key].default}"
    return f"unnamed {kind.__name__}"


def _described(kind: type[Declared], parts: dict[str, Any]) -> dict[str, Any]:
    shape = shape_of(kind.model_json_schema())
    fields = {name: _parted(part, parts) for name, part in shape.items() if name.rstrip("?") != _key(kind)}
    found: dict[str, Any] = {"fields": fields, "from": kind.sender, "to": kind.reader}
    if answer := getattr(kind, "answer_kind", None):
        found["answer"] = _parted(shape_of(answer().model_json_schema()), parts)
    for was in ("was", "fields_were"):
        if former := getattr(kind, was, None):
            found[was] = former
    return found


def _parted(shape: Any, parts: dict[str, Any]) -> Any:
    """A shape, with its large objects as keys of their own: several messages carry the same ones."""
    if isinstance(shape, list):
        return [_parted(one, parts) for one in shape]
    if not isinstance(shape, dict):
        return shape
    small = {name: _parted(one, parts) for name, one in shape.items()}
    if len(text := json.dumps(small, sort_keys=True)) < _LARGE:
        return small
    name = f"part {sha256(text.encode()).hexdigest()[:8]}"
    parts[name] = small
    return name


def outputs(_fast: bool) -> Iterator[tuple[str, Any]]:
    """Shapes of outputs and of a cluster's spec. The schema of a job's spec is in examples/job.schema.json."""
    parts: dict[str, Any] = {}
    with Place() as place:
        for name in ("cluster", *OUTPUTS):
            shape = shape_of(json.loads(place.run("schema", *name.split()).stdout))
            yield name, shape if name == "cluster" else _parted(shape, parts)
    yield from parts.items()


def shape_of(schema: dict[str, Any], definitions: dict[str, Any] | None = None) -> Any:
    """A JSON schema without titles and descriptions, with references replaced, in few words."""
    definitions = definitions or schema.get("$defs", {})

    def inner(part: dict[str, Any]) -> Any:
        return shape_of(part, definitions)

    if "$ref" in schema:
        return inner(definitions[schema["$ref"].rpartition("/")[2]])
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            found = sorted((inner(part) for part in schema[choice]), key=json.dumps)
            return " or ".join(found) if all(isinstance(one, str) for one in found) else {"one of": found}
    if "const" in schema or "enum" in schema:
        return {"in": schema.get("enum", [schema.get("const")])}
    match schema.get("type"):
        case "object" if "properties" in schema:
            must = schema.get("required", ())
            closed = {} if schema.get("additionalProperties") is False else {"...": "any"}
            fields = {name + ("" if name in must else "?"): inner(part) for name, part in schema["properties"].items()}
            return fields | closed
        case "object":
            more = schema.get("additionalProperties")
            return {"*": inner(more) if isinstance(more, dict) else "any"}
        case "array" if "prefixItems" in schema:
            return [inner(part) for part in schema["prefixItems"]]
        case "array":
            return [inner(schema.get("items", {})), "..."]
        case kind:
            limits = [
                f"{sign}{schema[name]}".replace(str(1 << 63), "2^63").replace("000000000.0", "e9")
                for name, sign in _RANGES.items()
                if name in schema
            ]
            return " ".join([str(kind or "any"), *limits, *([schema["pattern"]] if "pattern" in schema else [])])
