"""Random messages of declared kinds: right ones, and ones with something wrong that the reader must refuse by name.

Everything is drawn from the `random.Random` that is given, so that a seed makes the same messages again.
"""

from __future__ import annotations

import types
import typing
from random import Random
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from hyperpod_ext.runtime.ipc.declared import Declared, encode, fields_of

_TEXTS = ["", "a", "g1-s3", "127.0.0.1", "0", "-1", "null", "…", "\x00", "../x", "x" * 300]
_WRONG = [None, True, -1, 1 << 63, 10**400, 1.5, -0.5, 1e300, "x", [], [[]], [None], {}, {"x": []}, {"-1": 1}]


def example(kind: type[Declared], random: Random) -> Any:
    """One that is right; what may be left out sometimes is."""
    fields = {
        name: value_of(annotation, random)
        for name, annotation in fields_of(kind).items()
        if kind.model_fields[name].is_required() or random.random() < 0.5
    }
    return kind.model_validate(fields)


def value_of(annotation: Any, random: Random) -> Any:
    """Anything that a declared type takes."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        if named := [text for extra in arguments[1:] for text in getattr(extra, "examples", None) or ()]:
            return random.choice(named)
        low, high = _range(arguments[1:])
        if arguments[0] in (int, float):
            return random.choice([low, min(low + 1, high), arguments[0](random.uniform(low, min(high, 64))), high])
        return value_of(arguments[0], random)
    if origin is typing.Literal:
        return random.choice(arguments)
    if origin in (typing.Union, types.UnionType):
        return value_of(random.choice(arguments), random)
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return [value_of(arguments[0], random) for _ in range(random.randrange(3))]
    if origin is tuple:
        return [value_of(argument, random) for argument in arguments]
    if origin is dict:
        return {str(value_of(arguments[0], random)): value_of(arguments[1], random) for _ in range(random.randrange(3))}
    if isinstance(annotation, type) and issubclass(annotation, Declared):
        return encode(example(annotation, random))
    if annotation is types.NoneType:
        return None
    if annotation is Any:
        return random.choice([*_TEXTS, *_WRONG])
    return {int: random.randrange(9), float: random.random(), str: random.choice(_TEXTS), bool: random.random() < 0.5}[
        annotation
    ]


def _range(extras: typing.Sequence[Any]) -> tuple[Any, Any]:
    """The lowest and the highest number that metadata of a type allow."""
    low: Any = -(1 << 63)
    high: Any = (1 << 63) - 1
    for extra in extras:
        for bound in extra.metadata if isinstance(extra, FieldInfo) else [extra]:
            low = bound.ge if isinstance(bound, Ge) else bound.gt + 1 if isinstance(bound, Gt) else low
            high = bound.le if isinstance(bound, Le) else bound.lt - 1 if isinstance(bound, Lt) else high
    return low, high


def spoiled(message: dict[str, Any], key: str, random: Random) -> dict[str, Any]:
    """A right message with one thing changed. What comes out may by chance be right, too."""
    fields = [name for name in message if name != key]
    match random.randrange(4 if fields else 2):
        case 0:
            return {**message, random.choice(["owners", "extra", "", "__class__"]): random.choice(_WRONG)}
        case 1:
            return {**message, key: random.choice([*_WRONG, "nothing", "__init__", f"{message[key]} "])}
        case 2:
            gone = random.choice(fields)
            return {name: value for name, value in message.items() if name != gone}
    return {**message, random.choice(fields): random.choice([*_WRONG, *_TEXTS])}
