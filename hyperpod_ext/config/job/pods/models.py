"""Pydantic models of Kubernetes' published types, for parts of a pod and for strategic merge patches of a pod."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, ConfigDict, Field, create_model, model_validator

from hyperpod_ext.catalog.pod_fields import DIRECTIVE, MERGE_KEYS, RETAIN, field_text
from hyperpod_ext.config.base import Config, ContradictionError
from hyperpod_ext.config.job.pods import values

_LISTED = 12
"""Maximum number of field names in an error message. Without this limit, the message would list all 30 kinds of
volumes."""


class PodPart(Config):
    """Base class of models for a pod and its parts, such as a container or a volume."""

    model_config = ConfigDict(defer_build=True)

    choice: ClassVar[tuple[str, ...]] = ()
    """Names of the fields of which exactly one must be set; empty if there are no such fields."""

    @model_validator(mode="after")
    def _is_chosen(self) -> PodPart:
        found = [name for name in self.choice if getattr(self, name) is not None]
        if self.choice and not found:
            listed = ", ".join(self.choice[:_LISTED]) + (" or another" if len(self.choice) > _LISTED else "")
            raise ContradictionError(f"needs exactly one of {listed}")
        if len(found) > 1:
            raise ContradictionError(f"{' and '.join(found)} exclude each other; keep one of them", found[-1])
        return self


@cache
def model_of(kind: str, patch: bool = False) -> type[PodPart]:
    """Return the pydantic model of the type `kind` of `values.all_types`.

    Args:
        patch: whether the model is for a strategic merge patch. In a patch, all fields are optional and nullable, and
            only the types of values are checked.
    """
    fields: dict[str, Any] = {name: _field(kind, name, of, patch) for name, of in values.all_types()[kind].items()}
    if patch:
        fields[DIRECTIVE] = (Literal["replace", "delete", "merge"] | None, None)
        fields[RETAIN] = (tuple[str, ...] | None, None)
    text = f"Kubernetes' {values.base_of(kind)}."
    model = create_model(kind, __base__=PodPart, __doc__=text, **fields)
    if kind in values.ONE_OF and not patch:
        model.choice = tuple(values.ONE_OF[kind].split() or (name for name in fields if name != "name"))
    return model


def outline(kind: str) -> dict[str, Any]:
    """Return a JSON schema with the fields of the type `kind`. Nested fields are left out."""
    words = {"string": "string", "integer": "integer", "boolean": "boolean", "[": "array"}
    properties = {
        name: {"description": field_text(values.base_of(kind), name), "type": words.get(of, words.get(of[0], "object"))}
        for name, of in values.all_types()[kind].items()
    }
    return {"additionalProperties": False, "properties": properties}


def _field(kind: str, name: str, of: str, patch: bool) -> tuple[Any, Any]:
    base = values.base_of(kind)
    annotation = _annotation(of, f"{base}.{name}", patch)
    if patch:
        return annotation | None, Field(None)
    text, example = field_text(base, name), _example(annotation)
    examples = [example] if example not in ("", {}) else None
    if name in values.required(kind):
        return annotation, Field(description=text, examples=examples)
    default: Any = () if of.startswith("[]") else {} if of.startswith("{}") else None
    optional = annotation if default is not None else annotation | None
    return optional, Field(default, description=text, examples=examples)


def _annotation(of: str, place: str, patch: bool) -> Any:
    if of.startswith(("[]", "{}")):
        return _many(of[:2], _annotation(of[2:], place, patch), place, patch)
    if of in values.all_types():
        return model_of(of, patch)
    if of == "any" or (patch and of in ("quantity", "port-or-name")):
        return Any
    return values.PLAIN[of] if patch else values.form_of(of, place)


def _many(which: str, item: Any, place: str, patch: bool) -> Any:
    """Return the annotation of a list or mapping.

    Args:
        which: `[]` for a list, `{}` for a mapping.
        item: annotation of each item of the list, or of each value of the mapping.
        place: the field, as `Type.field`.
        patch: whether the annotation is for a strategic merge patch.
    """
    if patch and which == "{}":
        return dict[str, item | None]
    if patch:
        key = MERGE_KEYS.get(place.partition(".")[2])
        return tuple[Annotated[item, AfterValidator(_has_key(key))], ...] if key else tuple[item, ...]
    least, most = int(place in values.FILLED), values.MOST_ITEMS.get(place)
    key_form: Any = values.key_forms().get(place, str)
    kind = tuple[item, ...] if which == "[]" else dict[key_form, item]
    return Annotated[kind, Field(min_length=least, max_length=most)]


def _has_key(key: str) -> Callable[[PodPart], PodPart]:
    def check(item: PodPart) -> PodPart:
        if getattr(item, key) is None and getattr(item, DIRECTIVE) is None:
            raise ValueError(f"has no {key}, by which the items of this list are merged; add `{key}`")
        return item

    return check


def _example(annotation: Any) -> Any:
    """Return a minimal valid value of the type `annotation`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        given = [note.examples[0] for note in annotation.__metadata__ if getattr(note, "examples", None)]
        return given[0] if given else _example(arguments[0])
    if origin is Literal:
        return arguments[0]
    if origin is tuple:
        return [_example(arguments[0])]
    if origin is dict:
        return {_example(arguments[0]): _example(arguments[1])}
    if isinstance(annotation, type) and issubclass(annotation, PodPart):
        fields = annotation.model_fields.items()
        needed = [(name, info) for name, info in fields if info.is_required() or name in annotation.choice[:1]]
        return {name: info.examples[0] if info.examples else {} for name, info in needed}
    return {str: "text", int: 1, bool: True}.get(annotation, {})
