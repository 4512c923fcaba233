"""Kubernetes' types for pods and their parts, with the fields of each type and the merge keys of lists."""

from __future__ import annotations

from hyperpod_ext.catalog import facts

DIRECTIVE = "$patch"
RETAIN = "$retainKeys"
"""Keys of directives in a strategic merge patch of Kubernetes."""

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
"""Merge keys of lists in pods and containers, by the name of the list. In a strategic merge patch, lists with a merge
key (`patch strategy: merge` in Kubernetes' API reference) are merged item by item; all other lists are replaced."""


def pod_types() -> dict[str, dict[str, str]]:
    """Return Kubernetes' types by name, each with the types of its fields. The type of a field is a plain type such as
    `string`, the name of another type, `[]T` for a list of T, or `{}T` for a mapping with values of type T."""
    types: dict[str, dict[str, str]] = facts("pod_schema.json")["types"]
    return types


def required_fields() -> dict[str, list[str]]:
    """Return the names of required fields, by the name of the type."""
    required: dict[str, list[str]] = facts("pod_schema.json")["required"]
    return required


def choices() -> dict[str, list[str]]:
    """Return the allowed values of enumerated fields, by `Type.field`."""
    found: dict[str, list[str]] = facts("pod_schema.json")["choices"]
    return found


def field_text(kind: str, field: str) -> str:
    """Return the first sentence of Kubernetes' documentation for a field of the type `kind`; empty if unknown."""
    return str(facts("pod_texts.json")["texts"].get(kind, {}).get(field, ""))
