"""What a pod may say: Kubernetes' own types and their fields, and the keys by which it merges lists."""

from __future__ import annotations

import functools
import json
from pathlib import Path

_FILE = Path(__file__).with_name("pod_schema.json")

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


@functools.cache
def pod_types() -> dict[str, dict[str, str]]:
    """Types by name, each with its fields: `string`, a type's name, `[]T` for a list of T, `{}T` for a mapping to T."""
    types: dict[str, dict[str, str]] = json.loads(_FILE.read_text(encoding="utf-8"))["types"]
    return types
