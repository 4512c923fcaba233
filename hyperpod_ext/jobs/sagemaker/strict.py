"""Checks a request against the model of SageMaker's API, more strictly than botocore itself.

botocore checks required members, types, unknown members and minimum values. SageMaker also refuses values that are not
in an enum, texts that do not match a pattern, and values that are too long or too large. This module makes all checks
of botocore and of SageMaker.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hyperpod_ext.config.files.error_messages import named
from hyperpod_ext.config.files.nearest import nearest
from hyperpod_ext.errors import HyperpodExtError, Problem

IS_MISSING = "is missing"
"""Message for a required member that the request lacks."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "boolean": (bool,),
    "structure": (Mapping,),
    "map": (Mapping,),
    "list": (list, tuple),
}
_IN_WORDS = {
    "string": "text",
    "integer": "a whole number",
    "long": "a whole number",
    "float": "a number",
    "double": "a number",
    "boolean": "true or false",
    "structure": "a mapping",
    "map": "a mapping",
    "list": "a list",
}


def check_request(operation: str, request: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each part of `request` whose form SageMaker would refuse.

    Args:
        operation: name of the API operation, such as `CreateTrainingJob`.

    Raises:
        HyperpodExtError: botocore is not installed.
    """
    shape = _service_model().operation_model(operation).input_shape
    return list(_check(shape, request, ""))


@functools.cache
def _service_model() -> Any:
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError:
        hint = "pip install 'hyperpod-ext[sagemaker]'"
        raise HyperpodExtError("botocore, which checks requests to AWS, is not installed", hint=hint) from None
    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")


def _check(shape: Any, value: Any, path: str) -> Iterator[Problem]:
    kind: str = shape.type_name
    if kind == "timestamp":
        return
    right: Any = _TYPES[kind]
    if not isinstance(value, right) or (isinstance(value, bool) and kind != "boolean"):
        in_quotes = kind == "string" and isinstance(value, int | float) and not isinstance(value, bool)
        hint = f'write "{value}" in quotes' if in_quotes else ""
        yield Problem(f"must be {_IN_WORDS[kind]}, not {named(value)}", path=path, hint=hint)
        return
    match kind:
        case "structure":
            yield from _structure(shape, value, path)
        case "list":
            yield from _size(shape, len(value), "items", path)
            for index, item in enumerate(value):
                yield from _check(shape.member, item, f"{path}.{index}")
        case "map":
            yield from _size(shape, len(value), "entries", path)
            for key, item in value.items():
                yield from _check(shape.key, key, f"{path}.{key}")
                yield from _check(shape.value, item, f"{path}.{key}")
        case "string":
            yield from _string(shape, value, path)
        case "integer" | "long" | "float" | "double":
            yield from _number(shape, value, path)


def _structure(shape: Any, value: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name in shape.required_members:
        if name not in value:
            yield Problem(IS_MISSING, path=_join(path, name))
    if shape.metadata.get("union") and len(value) != 1:
        hint = f"valid: {', '.join(shape.members)}"
        yield Problem(f"must have exactly one member, not {len(value)}", path=path, hint=hint)
    for name, item in value.items():
        if name in shape.members:
            yield from _check(shape.members[name], item, _join(path, name))
        else:
            found = nearest(name, list(shape.members))
            hint = f"did you mean `{found}`?" if found else f"valid: {', '.join(shape.members)}"
            yield Problem("is not a known member", path=_join(path, name), hint=hint)


def _string(shape: Any, value: str, path: str) -> Iterator[Problem]:
    yield from _size(shape, len(value), "characters", path)
    if shape.enum and value not in shape.enum:
        found = nearest(value, shape.enum)
        hint = f"did you mean `{found}`?" if found else f"valid: {', '.join(shape.enum[:20])}"
        yield Problem(f"`{value}` is not a valid value", path=path, hint=hint)
    pattern = shape.metadata.get("pattern")
    if pattern and not _compiled(pattern).fullmatch(value):
        yield Problem(f"`{value}` does not match the pattern {pattern}", path=path)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression of Java. Python lacks Unicode properties, so similar character classes are used."""
    if r"\p{L}" in pattern:  # the pattern of tags is `[\p{L}\p{Z}\p{N}_.:/=+\-@]*`
        return re.compile(r"[\w .:/=+\-@]*")
    return re.compile(pattern.replace(r"\p{Alnum}", "a-zA-Z0-9"))


def _number(shape: Any, value: float, path: str) -> Iterator[Problem]:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if low is not None and value < low:
        yield Problem(f"{value} is too small", path=path, hint=f"write at least {low}")
    if high is not None and value > high:
        yield Problem(f"{value} is too large", path=path, hint=f"write at most {high}")


def _size(shape: Any, size: int, what: str, path: str) -> Iterator[Problem]:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if low is not None and size < low:
        yield Problem(f"has {size} {what}", path=path, hint=f"at least {low} are required")
    if high is not None and size > high:
        yield Problem(f"has {size} {what}", path=path, hint=f"at most {high} are allowed")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
