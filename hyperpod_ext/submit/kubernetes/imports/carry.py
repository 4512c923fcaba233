"""What of somebody else's pods a spec has no field for, as its overlay: only what is certain to mean the same. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.catalog.pod_fields import pod_types
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import KubernetesOverlay, Overlay
from hyperpod_ext.submit.contract.targets import get_target
from hyperpod_ext.submit.kubernetes.imports.import_pod import is_own
from hyperpod_ext.submit.kubernetes.overlays.check import REFUSED_OF_CONTAINER, REFUSED_OF_POD

_READ_OF_POD = {"containers", "volumes", "nodeSelector", "serviceAccountName", "terminationGracePeriodSeconds"}
_READ_OF_POD |= {"priorityClassName", "imagePullSecrets", "tolerations", "affinity", *REFUSED_OF_POD}
_READ_OF_CONTAINER = {"env", "resources", "volumeMounts", "imagePullPolicy", "securityContext", *REFUSED_OF_CONTAINER}
"""Fields that the spec itself has: what reads them names their losses."""
_MOUNTS = ("volumeMounts", "volumeDevices")


def carried(job: JobConfig, target: str, found: Mapping[str, Any]) -> JobConfig:
    """`job` with an overlay for what all pods of `found` have in common, and the target takes."""
    pods = list(_pods(found))
    if not pods:
        return job
    find = get_target(target).problems
    parts = [_parts(pod) for pod in pods]
    common = {key: value for key, value in parts[0].items() if all(one.get(key) == value for one in parts)}
    while common:
        try:
            changed = _with(job, common)
        except ValidationError:
            return job  # values that JSON has no words for
        problems = list(find(changed))
        if not problems:
            return changed
        wrong = {tuple(one.path.split(".")[2:4]) for one in problems}
        left = {key: value for key, value in common.items() if key not in wrong}
        if left == common:
            return job
        common = left
    return job


def _with(job: JobConfig, parts: Mapping[tuple[str, ...], Any]) -> JobConfig:
    patches: dict[str, dict[str, Any]] = {"container": {}, "pod": {}}
    for (section, field), value in parts.items():
        patches[section][field] = value
    overlay = Overlay(kubernetes=KubernetesOverlay.model_validate(patches))
    return job.model_copy(update={"overlay": overlay})


def _pods(found: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    spec = found.get("spec") or {}
    roles = spec.get("pytorchReplicaSpecs") or {}
    for one in [*(spec.get("replicaSpecs") or []), *(roles.values() if isinstance(roles, dict) else roles)]:
        pod = (one.get("template") or {}).get("spec") or {}
        if pod.get("containers"):
            yield pod


def _parts(pod: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Section and field of the overlay, and what they are."""
    first, *others = pod["containers"]
    found: dict[tuple[str, ...], Any] = {}
    for name, value in pod.items():
        if name in pod_types()["PodSpec"] and name not in _READ_OF_POD and _stands_alone(name, value):
            found["pod", name] = value
    affinity = {name: rule for name, rule in (pod.get("affinity") or {}).items() if not is_own(rule)}
    if affinity:
        found["pod", "affinity"] = affinity
    if others and _stands_alone("containers", others):
        found["pod", "containers"] = others
    for name, value in first.items():
        if name in pod_types()["Container"] and name not in _READ_OF_CONTAINER:
            found["container", name] = value
    variables = [one for one in first.get("env") or [] if _is_reference(one)]
    if variables:
        found["container", "env"] = variables
    context = {key: value for key, value in (first.get("securityContext") or {}).items() if key != "privileged"}
    if context:
        found["container", "securityContext"] = context
    return found


def _is_reference(variable: Mapping[str, Any]) -> bool:
    """Whether the value comes from the pod or a config map; those of secrets have a field of their own."""
    source = variable.get("valueFrom")
    return isinstance(source, Mapping) and bool(source) and "secretKeyRef" not in source


def _stands_alone(name: str, value: Any) -> bool:
    """Other containers are carried where they mount nothing: volumes have other names in what we render."""
    if not name.lower().endswith("containers"):
        return True
    return isinstance(value, list) and not any(
        not isinstance(one, Mapping) or any(one.get(field) for field in _MOUNTS) for one in value
    )
