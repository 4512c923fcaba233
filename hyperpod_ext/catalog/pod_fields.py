"""What a pod may say: Kubernetes' own types and their fields, and the keys by which it merges lists."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

DIRECTIVE = "$patch"
RETAIN = "$retainKeys"
"""Keys of a strategic merge patch that are no fields."""

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
}
"""Field of a pod or container, and what tells the items of its list apart; all other lists are replaced as a whole.
As the API reference of Kubernetes publishes them (`patch strategy: merge`, `patch merge key`)."""


def pod_types() -> dict[str, dict[str, str]]:
    """Types by name, each with its fields: `string`, a type's name, `[]T` for a list of T, `{}T` for a mapping to T."""
    types: dict[str, dict[str, str]] = _read("pod_schema.json")["types"]
    return types


def required_fields() -> dict[str, list[str]]:
    """Fields that must be there, by the name of the type."""
    required: dict[str, list[str]] = _read("pod_schema.json")["required"]
    return required


def choices() -> dict[str, list[str]]:
    """Values of the fields that are a choice, by `Type.field`."""
    found: dict[str, list[str]] = _read("pod_schema.json")["choices"]
    return found


def field_text(kind: str, field: str) -> str:
    """The first sentence of Kubernetes' own documentation of a field."""
    return str(_read("pod_texts.json")["texts"].get(kind, {}).get(field, ""))


@functools.cache
def _read(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return facts
