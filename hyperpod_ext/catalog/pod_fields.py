"""Kubernetes' types of pods, their fields, and merge keys of lists."""

from __future__ import annotations

from hyperpod_ext.catalog import facts

DIRECTIVE = "$patch"
RETAIN = "$retainKeys"
"""Directives of a strategic merge patch."""

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
"""Merge keys of lists in pods and containers, as in Kubernetes' API reference (`patch strategy: merge`). All other
lists are replaced as a whole."""


def pod_types() -> dict[str, dict[str, str]]:
    """Return types by name with their fields: `string`, a type's name, `[]T` for a list of T, `{}T` for a mapping."""
    types: dict[str, dict[str, str]] = facts("pod_schema.json")["types"]
    return types


def required_fields() -> dict[str, list[str]]:
    """Return required fields, by type."""
    required: dict[str, list[str]] = facts("pod_schema.json")["required"]
    return required


def choices() -> dict[str, list[str]]:
    """Return the values of enumerated fields, by `Type.field`."""
    found: dict[str, list[str]] = facts("pod_schema.json")["choices"]
    return found


def field_text(kind: str, field: str) -> str:
    """Return the first sentence of Kubernetes' documentation of a field."""
    return str(facts("pod_texts.json")["texts"].get(kind, {}).get(field, ""))
