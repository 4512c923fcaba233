"""Differences between a wanted and an existing object, field by field. Pure.

Fields that only the existing object has are ignored, because a server adds defaults and a status to each object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_NAMED = ("name", "mountPath", "key", "containerPort")
"""Fields that identify the items of a list."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field with different values in the existing object (`there`) and in the wanted object.

    A value is None if its object lacks the field.
    """

    path: str
    there: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.there)} -> {_shown(self.wanted)}"


def differences(wanted: Any, there: Any, path: str = "") -> Iterator[FieldDifference]:
    """Yield each field of `wanted` that `there` lacks or has with another value."""
    if isinstance(wanted, Mapping) and isinstance(there, Mapping):
        for key, value in wanted.items():
            yield from differences(value, there.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(wanted, list) and isinstance(there, list):
        yield from _of_lists(wanted, there, path)
    elif wanted != there and not (wanted in (None, {}, []) and there in (None, {}, [])):
        yield FieldDifference(path, there, wanted)


def _of_lists(wanted: list[Any], there: list[Any], path: str) -> Iterator[FieldDifference]:
    by = next(
        (key for key in _NAMED if all(isinstance(one, Mapping) and key in one for one in [*wanted, *there])), None
    )
    if by is None:
        for index in range(max(len(wanted), len(there))):
            ours = wanted[index] if index < len(wanted) else None
            theirs = there[index] if index < len(there) else None
            yield from differences(ours, theirs, f"{path}.{index}")
        return
    ours_by, theirs_by = {one[by]: one for one in wanted}, {one[by]: one for one in there}
    for name in dict.fromkeys([*ours_by, *theirs_by]):
        yield from differences(ours_by.get(name), theirs_by.get(name), f"{path}[{name}]")


def _shown(value: Any) -> str:
    text = "(nothing)" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."
