"""Finds the type and the documentation of a field by the field's path.

The location in a pydantic error also contains the tag of a union's member (`tiers, 1, peer, every_steps`), and a marker
for keys of dictionaries. The field paths that this module takes and returns contain no tags and no such markers.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.files.field_docs import description
from hyperpod_ext.config.files.nearest import known_as, nearest
from hyperpod_ext.config.job.pods.fields import pod_fields

_KEY_MARK = "[key]"


@dataclass(frozen=True, slots=True)
class Expected:
    """Type and documentation of the value that a spec should have at `path`."""

    path: Path
    models: tuple[type[BaseModel], ...] = ()
    """Models that a mapping at this path can have; several for a union, none if the value is no mapping."""
    holder: type[BaseModel] | None = None
    """Model that contains the field at this path; None if the path is inside a list or dictionary."""
    description: str = ""
    """Documentation of the field at this path, or of the nearest field around it."""
    examples: tuple[object, ...] = ()
    """Examples of valid values; may be empty."""
    is_key: bool = False
    """Whether the path points to the key of a dictionary entry instead of the entry's value."""


def expected_at(model: type[BaseModel], location: tuple[str | int, ...]) -> Expected:
    """Return type and documentation of the value at the `location` in a pydantic error of `model`."""
    annotation: Any = model
    found = Expected((), (model,))
    for position, part in enumerate(location):
        members = models_in(annotation)
        if len(members) > 1 and (member := _tagged(members, part)) is not None:
            annotation = member
            found = replace(found, models=(member,))
            continue
        if location[position + 1 : position + 2] == (_KEY_MARK,):
            return Expected((*found.path, part), description=_documented(_key_type(annotation)), is_key=True)
        info = members[0].model_fields.get(str(part)) if len(members) == 1 else None
        if info is not None:
            annotation, examples = annotation_of(info), info.examples
            described = description(members[0], str(part))
        else:
            annotation, examples = item_type(annotation), None
            described = _documented(annotation) or found.description
        found = Expected(
            path=(*found.path, part),
            models=tuple(models_in(annotation)),
            holder=members[0] if len(members) == 1 else None,
            description=described,
            examples=tuple(examples or ()),
        )
    return found


def annotation_of(info: FieldInfo) -> Any:
    """Return the type of a field. For a section with Kubernetes' own fields, return the model that checks the
    section."""
    published = pod_fields(info)
    return info.annotation if published is None else published.model()


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in a type annotation: the annotation itself if it is a model, or the models of a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return models_in(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [model for part in get_args(annotation) for model in models_in(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def field_paths(model: type[BaseModel], prefix: Path = ()) -> Iterator[Path]:
    """Yield the path of every field in `model` and its sections, outer fields before inner ones. Fields inside lists
    are left out."""
    for name in model.model_fields:
        yield (*prefix, name)
    for name, info in model.model_fields.items():
        members = models_in(annotation_of(info))
        if pod_fields(info) is not None:
            yield from ((*prefix, name, field) for field in members[0].model_fields)
        elif len(members) == 1:
            yield from field_paths(members[0], (*prefix, name))


def meant_by(name: str, names: Collection[str], model: type[BaseModel]) -> tuple[str | None, Path | None]:
    """Return the field that the user probably meant with the unknown field `name`.

    Returns:
        A name in `names` and None, or None and the path of a field in another section, or None twice.
    """
    known = known_as(name)
    if known in names:
        return known, None
    for one in (name, known):
        if elsewhere := next((other for other in field_paths(model) if other[-1] == one), None):
            return None, elsewhere
    return nearest(name, names), None


def kinds_of(members: Iterable[type[BaseModel]], tag: str) -> dict[str, type[BaseModel]]:
    """Return the models of a union by the value of their field `tag`, such as `kind`."""
    return {str(kind): member for member in members for kind in get_args(member.model_fields[tag].annotation)}


def _tagged(members: list[type[BaseModel]], tag: str | int) -> type[BaseModel] | None:
    return next((member for member in members if tag in _tags(member)), None)


def _tags(member: type[BaseModel]) -> set[object]:
    fields = member.model_fields.values()
    return {tag for info in fields if get_origin(info.annotation) is Literal for tag in get_args(info.annotation)}


def item_type(annotation: Any) -> Any:
    """Return the type of the items of a list or tuple, or of the values of a dictionary; None for other types."""
    arguments = [part for part in get_args(_bare(annotation)) if part is not Ellipsis]
    return arguments[-1] if arguments else None


def _key_type(annotation: Any) -> Any:
    arguments = get_args(_bare(annotation))
    return arguments[0] if arguments else None


def _bare(annotation: Any) -> Any:
    """Return the type `annotation` without its `Annotated` wrapper and without `| None`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _bare(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return _bare(parts[0]) if len(parts) == 1 else annotation
    return annotation


def _documented(annotation: Any) -> str:
    notes = getattr(annotation, "__metadata__", ())
    return next((note.description for note in notes if isinstance(note, FieldInfo) and note.description), "")
