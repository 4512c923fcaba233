"""Properties of CloudFormation types that an update cannot change: another value replaces the resource."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("create_only.json")


@dataclass(frozen=True, slots=True)
class CreateOnly:
    """Paths of properties, dotted; `*` is any item of a list."""

    always: tuple[str, ...]
    """Another value replaces the resource."""
    sometimes: tuple[str, ...]
    """Some values replace it; the schema does not say which."""


@functools.cache
def _types() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))["types"]
    return found


def create_only(kind: str) -> CreateOnly | None:
    """Return the create-only properties of a CloudFormation type; None for an unknown type."""
    if kind not in _types():
        return None
    fields = _types()[kind]
    return CreateOnly(tuple(fields.get("always", ())), tuple(fields.get("sometimes", ())))
