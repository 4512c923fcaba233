"""Import of a TrainJob's pods from its trainer and the patch of its runtime. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NODE = "node"
"""Name of the group and its container in Kubeflow's runtimes."""


def trainer_pod(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod template of a TrainJob's nodes, without fields that only its runtime has."""
    trainer = _mapping(spec.get("trainer"))
    template = next(_patches(spec), {})
    pod = dict(_mapping(template.get("spec")))
    patched = next((one for one in _list(pod.get("containers")) if one.get("name") == _NODE), {})
    container = {name: value for name, value in patched.items() if name in ("volumeMounts", "securityContext")}
    container |= {name: value for name, value in trainer.items() if name in ("image", "command", "args", "env")}
    container["resources"] = trainer.get("resourcesPerNode") or {}
    return {"metadata": _mapping(template.get("metadata")), "spec": pod | {"containers": [container]}}


def _patches(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the nodes' templates in the patches."""
    for patch in _list(spec.get("runtimePatches")):
        jobs = _mapping(_mapping(_mapping(patch.get("trainingRuntimeSpec")).get("template")).get("spec"))
        for job in _list(jobs.get("replicatedJobs")):
            if job.get("name") == _NODE:
                yield _mapping(_mapping(_mapping(job.get("template")).get("spec")).get("template"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
