"""The reference of job.yaml and cluster.yaml, field by field, from the pydantic models of the specs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from generator.examples import example
from hyperpod_ext.config.base import Config
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.explain import explain
from hyperpod_ext.config.files.schema_path import annotation_of, item_type, models_in
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.pods.fields import pod_fields

SPECS: dict[str, type[Config]] = {"job": JobConfig, "cluster": ClusterConfig}
OWN_PAGE = 5
"""Sections with at least this many fields below have a page of their own."""


@dataclass(frozen=True)
class Field:
    """A field of a spec at its dotted path. Paths of fields in list items have no index."""

    path: tuple[str, ...]
    info: FieldInfo
    models: tuple[type[BaseModel], ...]
    """Models of the field's section or list items; empty for a field with a plain value."""
    kinds: tuple[str, ...]
    """Values of `kind` for which the field exists; empty if it exists for all."""
    foreign: bool
    """True for a section that contains Kubernetes' own fields. The page does not list these fields."""
    is_list: bool
    is_mapping: bool

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


def fields(spec: str) -> list[Field]:
    """Return every field of a spec, in the order of its models."""
    return list(_below((SPECS[spec],), ()))


def _below(models: tuple[type[BaseModel], ...], path: tuple[str, ...]) -> Iterator[Field]:
    for name in dict.fromkeys(name for model in models for name in model.model_fields):
        holders = [model for model in models if name in model.model_fields]
        info = holders[0].model_fields[name]
        inner, lists, mappings = _shape(annotation_of(info))
        foreign = pod_fields(info) is not None
        kinds = () if len(holders) == len(models) else tuple(kind for one in holders for kind in _kinds(one))
        yield Field((*path, name), info, inner, kinds, foreign, lists, mappings)
        if inner and not foreign:
            yield from _below(inner, (*path, name))


def _shape(annotation: Any) -> tuple[tuple[type[BaseModel], ...], bool, bool]:
    """Return the models in a type, and whether the type is a list or a mapping of them."""
    lists = mappings = False
    while annotation is not None:
        if found := models_in(annotation):
            return tuple(found), lists, mappings
        mappings = mappings or _is(annotation, dict)
        lists = lists or _is(annotation, tuple) or _is(annotation, list)
        annotation = item_type(annotation)
    return (), lists, mappings


def _is(annotation: Any, kind: type) -> bool:
    return get_origin(annotation) is kind or any(_is(one, kind) for one in get_args(annotation))


def _kinds(model: type[BaseModel]) -> tuple[str, ...]:
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation) if kind is not None and get_origin(kind.annotation) is Literal else ()


def pages() -> dict[str, str]:
    """Return the pages of both specs, by their paths on the site."""
    made = {}
    for spec in SPECS:
        listed = fields(spec)
        for section in (None, *own_pages(listed)):
            made[page_of(spec, section)] = _page(spec, section, listed)
    return made


def own_pages(listed: list[Field]) -> list[str]:
    """Return the sections that have a page of their own."""
    counts = {one.path[0]: sum(other.path[0] == one.path[0] for other in listed) - 1 for one in listed}
    return [name for name, count in counts.items() if count >= OWN_PAGE]


def page_of(spec: str, section: str | None) -> str:
    """Return the site path of a section's page; for None, the site path of the spec's first page."""
    return f"reference/{spec}/{section or 'index'}.md"


def anchors() -> dict[str, str]:
    """Return the path and anchor on the site of every field of a job spec, by the field's dotted path."""
    listed = fields("job")
    owned = own_pages(listed)
    return {one.dotted: f"{_page_with('job', one, owned)}#{anchor(one)}" for one in listed if len(one.path) > 1}


def _page_with(spec: str, field: Field, owned: list[str]) -> str:
    return page_of(spec, field.path[0] if field.path[0] in owned and len(field.path) > 1 else None)


def anchor(field: Field) -> str:
    """Return the anchor of a field's heading."""
    return "-".join(field.path)


def _page(spec: str, section: str | None, listed: list[Field]) -> str:
    owned = own_pages(listed)
    shown = [
        one for one in listed if (one.path[0] == section and len(one.path) > 1 if section else one.path[0] not in owned)
    ]
    if section:
        first = next(one for one in listed if one.path == (section,))
        title = f"{spec}.yaml: {section}"
        parts = [f"# {title}", _text(explain(SPECS[spec], section)["description"]), _facts(spec, first)]
    else:
        shown = [one for one in listed if len(one.path) == 1 or one.path[0] not in owned]
        doc = re.sub(r"\s+", " ", SPECS[spec].__doc__ or "")
        parts = [
            f"# {spec}.yaml",
            f"{doc} `hp-ext validate` checks a file, and `hp-ext explain {spec}.FIELD` shows one field in a terminal. "
            f"`hp-ext schema {spec}` prints the JSON schema for editors.",
            "Each example is valid at its place. A dot in the name of a field leads into a section; in a list, the "
            "field belongs to each item.",
        ]
    parts += [_field(spec, one, owned if not section else []) for one in shown]
    return "\n\n".join(parts) + "\n"


def _field(spec: str, field: Field, owned: list[str]) -> str:
    level = "##" if len(field.path) == 1 else "###" if len(field.path) > 2 else "##"
    explained = explain(SPECS[spec], field.dotted)
    parts = [f"{level} {field.dotted} {{#{anchor(field)}}}", _text(explained["description"]) or "Kind of the entry."]
    if field.kinds:
        parts.append("Only with kind " + " or ".join(f"`{kind}`" for kind in field.kinds) + ".")
    parts.append(_facts(spec, field))
    if field.path[0] in owned and len(field.path) == 1:
        parts.append(f"[Fields of `{field.dotted}`]({field.path[0]}.md)")
    if field.foreign:
        parts.append("The section has Kubernetes' own fields: [Fields of the targets](../../fields.md).")
    return "\n\n".join(parts)


def _facts(spec: str, field: Field) -> str:
    explained = explain(SPECS[spec], field.dotted)
    rows = [f"- **Type:** {_code(_type(field, str(explained['type'])))}"]
    if field.info.is_required():
        rows.append("- **Required**")
    elif explained["default"] is not None and explained["default"] not in ("null", "[]", "{}", ""):
        rows.append(f"- **Default:** `{explained['default']}`")
    text = yaml.safe_dump(example(spec, (SPECS[spec],), field.path), sort_keys=False, width=100)
    return "\n".join(rows) + f"\n\n```yaml\n{text.rstrip()}\n```"


def _type(field: Field, text: str) -> str:
    if field.models and field.is_mapping:
        return "mapping from a name to fields"
    return text


def _code(text: str) -> str:
    return f"`{text}`" if text not in ("fields", "list of fields") else text


def _text(text: str) -> str:
    """Escape the characters of a docstring that Markdown would read as HTML or emphasis, outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", part) for part in parts)
