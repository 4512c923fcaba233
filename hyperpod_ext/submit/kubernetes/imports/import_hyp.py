"""From the config.yaml of AWS's `hyp init hyp-pytorch-job` to a JobConfig, as far as that can say it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from hyperpod_ext.catalog.instances import instance
from hyperpod_ext.config.files.document import dotted
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.imports.report import Imported
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
_FORMS: dict[str, type] = {"environment": dict, "label_selector": dict, "annotations": dict, "labels": dict}
_FORMS |= {"command": list, "args": list, "volume": list, "image_pull_secrets": list, "tolerations": list}
_NUMBERS = {
    "node_count",
    "accelerators",
    "vcpu",
    "memory",
    "accelerators_limit",
    "vcpu_limit",
    "memory_limit",
    "max_retry",
}
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
    for key in ("command", "args"):  # hyp takes them as one text, too
        if isinstance(rest.get(key), str):
            rest[key] = _words_of(rest[key])
    if problems := list(_wrong_forms(rest, source)):
        raise ConfigError(problems)
    left: list[str] = []
    document: dict[str, Any] = {"mode": "plain"}
    entries = [{"name": name, "value": value} for name, value in (rest.pop("environment", None) or {}).items()]
    read_environment(entries, document, {}, left)
    read_command(rest, document, left)
    for theirs, path in _SAME.items():
        if theirs in rest:
            _put(document, path, rest.pop(theirs))
    place_script(document, left, in_image=True)
    _resources(rest, document, left)
    document.pop("launched_nodes", None)
    document.pop("launched_least", None)
    launched = document.pop("launched_workers", None)
    _workers(rest, document, left)
    if launched is not None:
        document["workers_per_node"] = launched  # the launcher goes by its own flag
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


def _words_of(text: str) -> Any:
    """`[python, train.py]` or `python train.py`; the text itself where it is neither."""
    try:
        return yaml.safe_load(text) if text.startswith("[") else shlex.split(text)
    except (yaml.YAMLError, ValueError):
        return text


def _wrong_forms(found: Mapping[str, Any], source: str) -> Iterator[Problem]:
    for name, value in found.items():
        kind = _FORMS.get(name)
        if kind is not None and not isinstance(value, kind):
            belongs = "fields belong" if kind is dict else "a list belongs"
            yield Problem(f"{belongs} here, not {str(value)[:40]!r}", path=name, source=source)
        elif kind is None and isinstance(value, dict | list):
            yield Problem("one value belongs here", path=name, source=source)
        elif name in _NUMBERS and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", str(value)):
            yield Problem(f"a number belongs here, not {str(value)[:40]!r}", path=name, source=source)
        elif name == "volume" and not all(isinstance(one, dict) for one in value):
            yield Problem("each volume has fields", path=name, source=source)


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
