"""From the config.yaml of AWS's `hyp init hyp-pytorch-job` to a JobConfig, as far as that can say it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.catalog.instances import instance
from hyperpod_ext.config.files.document import dotted
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.kubernetes.imports.import_job import Imported
from hyperpod_ext.submit.kubernetes.imports.import_pod import place_script, read_command, read_environment

_TEMPLATE = "hyp-pytorch-job"
_SAME = {
    "job_name": ("name",),
    "image": ("image",),
    "node_count": ("nodes",),
    "namespace": ("kubernetes", "namespace"),
    "pull_policy": ("kubernetes", "pull_policy"),
    "service_account_name": ("kubernetes", "service_account"),
    "instance_type": ("resources", "instance_type"),
    "accelerators": ("resources", "accelerators"),
    "vcpu": ("resources", "cpus"),
    "label_selector": ("scheduling", "node_selector"),
    "queue_name": ("scheduling", "queue"),
    "priority": ("scheduling", "priority"),
    "max_retry": ("relaunch", "max_process_restarts"),
}
"""Their field, and ours that says the same."""
_LIMITS = {"accelerators_limit": "accelerators", "vcpu_limit": "vcpu", "memory_limit": "memory"}


def is_hyp_config(found: object) -> bool:
    """Whether this document is one of hyp's."""
    return isinstance(found, dict) and "kind" not in found and ("job_name" in found or "template" in found)


def import_hyp(found: Mapping[str, Any], source: str) -> Imported:
    """The job, and what of the file a JobConfig cannot say.

    Raises:
        ConfigError: it is a template of hyp for something else, or what it says is no valid job.
    """
    if (template := found.get("template", _TEMPLATE)) != _TEMPLATE:
        raise ConfigError(
            [Problem(f"is a {template} of hyp; import reads {_TEMPLATE}", path="template", source=source)]
        )
    rest = {key: value for key, value in found.items() if value not in (None, "", [], {})}  # hyp writes all fields
    for key in ("template", "version"):
        rest.pop(key, None)
    left: list[str] = []
    document: dict[str, Any] = {"mode": "plain"}
    read_command(rest, document, left)
    place_script(document, left)
    for theirs, path in _SAME.items():
        if theirs in rest:
            _put(document, path, rest.pop(theirs))
    _resources(rest, document, left)
    document.pop("launched_nodes", None)
    launched = document.pop("launched_workers", None)
    _workers(rest, document, left)
    if launched is not None:
        document["workers_per_node"] = launched  # the launcher goes by its own flag
    entries = [{"name": name, "value": value} for name, value in (rest.pop("environment", None) or {}).items()]
    read_environment(entries, document, {}, left)
    for theirs, required in (("required_topology", True), ("preferred_topology", False)):
        if level := rest.pop(theirs, None):
            _put(document, ("scheduling", "topology"), {"level": level, "required": required})
    if volumes := [_volume(one) for one in rest.pop("volume", None) or []]:
        document["volumes"] = volumes
    rest.pop("deep_health_check_passed_nodes_only", None)  # what scheduling.healthy_only does by default
    left += [f"{key}: a spec has no such field" for key in rest]
    try:
        return Imported(JobConfig.model_validate(document, strict=False), "hyperpod-eks", left)
    except ValidationError as error:
        problems = [Problem(str(one["msg"]), path=dotted(one["loc"]), source=source) for one in error.errors()]
        raise ConfigError(problems) from None


def _put(document: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        document = document.setdefault(part, {})
    document[path[-1]] = value


def _resources(rest: dict[str, Any], document: dict[str, Any], left: list[str]) -> None:
    asked = {"accelerators": document.get("resources", {}).get("accelerators")}
    asked |= {"vcpu": document.get("resources", {}).get("cpus"), "memory": rest.pop("memory", None)}
    if asked["memory"] is not None:
        _put(document, ("resources", "memory_mib"), int(float(asked["memory"]) * 1024))
    for limit, request in _LIMITS.items():
        if limit in rest and rest[limit] != asked[request]:
            left.append(f"{limit}: accelerators are limited to what is asked for, CPU and memory are not limited")
        rest.pop(limit, None)


def _workers(rest: dict[str, Any], document: dict[str, Any], left: list[str]) -> None:
    """hyp's `auto` and `gpu`: one for each accelerator of the node."""
    tasks = str(rest.pop("tasks_per_node", "auto"))
    asked = document.get("resources", {})
    machine = instance(asked.get("instance_type") or "")
    if tasks.isdecimal():
        document["workers_per_node"] = int(tasks)
    elif tasks != "cpu" and (found := asked.get("accelerators") or (machine.accelerators if machine else 0)):
        document["workers_per_node"] = found
    elif "workers_per_node" not in document:
        left.append(f"tasks_per_node: {tasks}, which depends on the node; workers_per_node is 1")


def _volume(one: Mapping[str, Any]) -> dict[str, Any]:
    read_only = {"read_only": True} if str(one.get("read_only", "")).lower() == "true" else {}
    if one.get("type") == "hostPath":
        return {"kind": "host", "path": one.get("mount_path"), "host_path": one.get("path")} | read_only
    return {"kind": "claim", "path": one.get("mount_path"), "claim": one.get("claim_name")} | read_only
