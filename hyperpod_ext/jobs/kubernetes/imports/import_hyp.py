"""Imports a config.yaml that AWS's command `hyp init hyp-pytorch-job` wrote. Pure.

The file is first converted to the HyperPodPyTorchJob that hyp would create, which is then imported.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import yaml

from hyperpod_ext.catalog import labels
from hyperpod_ext.catalog.instances import instance
from hyperpod_ext.config.files.document import Document, Path, SourceLocation, dotted, parse
from hyperpod_ext.config.names import DNS_LABEL
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.imports.report import Fields, Imported
from hyperpod_ext.jobs.kubernetes.imports.import_job import import_object

_TEMPLATE = "hyp-pytorch-job"
_KIND = "HyperPodPyTorchJob"
_GROUP: Path = ("spec", "replicaSpecs", 0)
_POD: Path = (*_GROUP, "template", "spec")
_CONTAINER: Path = (*_POD, "containers", 0)
_SELECTOR: Path = (*_POD, "nodeSelector")
_ELASTIC: Path = ("spec", "elasticPolicy")
_RUN: Path = ("spec", "runPolicy")
_SAME: dict[str, Path] = {
    "job_name": ("metadata", "name"),
    "namespace": ("metadata", "namespace"),
    "queue_name": ("metadata", "labels", labels.QUEUE),
    "priority": ("metadata", "labels", labels.PRIORITY),
    "preferred_topology": ("metadata", "annotations", labels.TOPOLOGY_PREFERRED),
    "required_topology": ("metadata", "annotations", labels.TOPOLOGY_REQUIRED),
    "image": (*_CONTAINER, "image"),
    "command": (*_CONTAINER, "command"),
    "args": (*_CONTAINER, "args"),
    "pull_policy": (*_CONTAINER, "imagePullPolicy"),
    "service_account_name": (*_POD, "serviceAccountName"),
    "scheduler_type": (*_POD, "schedulerName"),
    "instance_type": (*_SELECTOR, labels.INSTANCE_TYPE),
    "node_count": (*_GROUP, "replicas"),
    "replica_count": (*_GROUP, "replicas"),
    "max_node_count": (*_ELASTIC, "maxReplicas"),
    "max_replica_count": (*_ELASTIC, "maxReplicas"),
    "elastic_replica_increment_step": (*_ELASTIC, "replicaIncrementStep"),
    "elastic_replica_discrete_values": (*_ELASTIC, "replicaDiscreteValues"),
    "elastic_graceful_shutdown_timeout_in_seconds": (*_ELASTIC, "gracefulShutdownTimeoutInSeconds"),
    "elastic_scaling_timeout_in_seconds": (*_ELASTIC, "scalingTimeoutInSeconds"),
    "elastic_scale_up_snooze_time_in_seconds": (*_RUN, "restartPolicy", "scaleUpSnoozeTimeInSeconds"),
    "max_retry": (*_RUN, "jobMaxRetryCount"),
}
"""Path in the HyperPodPyTorchJob for each field of the config.yaml."""
_FORMS: dict[str, type] = {"environment": dict, "label_selector": dict, "elastic_replica_discrete_values": list}
_FORMS |= {"command": list, "args": list, "volume": list}
_NUMBERS = {
    "node_count",
    "replica_count",
    "max_node_count",
    "max_replica_count",
    "accelerators",
    "vcpu",
    "memory",
    "efa",
}
_NUMBERS |= {"accelerators_limit", "vcpu_limit", "memory_limit", "efa_limit", "accelerator_partition_count"}
_NUMBERS |= {"accelerator_partition_limit", "max_retry", "elastic_replica_increment_step"}
_NUMBERS |= {name for name in _SAME if name.endswith("_in_seconds")}
_EMPTY: tuple[Any, ...] = (None, "", [], {})


@dataclass
class _AsJob(Document):
    """A config.yaml, and the HyperPodPyTorchJob that is made from it.

    For a path in the HyperPodPyTorchJob, the methods of Document return the line of the config.yaml's field.
    """

    job: dict[str, Any] = field(default_factory=dict)
    written: dict[Path, Path] = field(default_factory=dict)
    """Path in the config.yaml for each path in the HyperPodPyTorchJob."""
    overruled: list[Problem] = field(default_factory=list)
    """Problems about values that another field overrides. For example, `replica_count` overrides `node_count`."""

    def put(self, path: Path, value: Any, at: Path) -> None:
        """Set the value at `path` of the HyperPodPyTorchJob. A later value overrides an earlier value at the same path.

        Args:
            at: path of the field in the config.yaml that has the value; empty if the value is from no field.
        """
        before, self.written[path] = self.written.get(path), at
        holder: Any = self.job
        for part, below in pairwise(path):
            empty: Any = [] if isinstance(below, int) else {}
            if isinstance(part, int):
                holder += [empty] * (part == len(holder))
                holder = holder[part]
            else:
                holder = holder.setdefault(part, empty)
        if isinstance(path[-1], int):
            holder.append(value)
        else:
            if before and holder[path[-1]] != value:
                message = f"{holder[path[-1]]} is not used, because {dotted(at)} sets {value}"
                self.overruled.append(Problem(message, dotted(before), self.source, super().location(before).line))
            holder[path[-1]] = value

    def location(self, path: Path) -> SourceLocation:
        return super().location(self._in_file(path))

    def problem(self, path: Path, message: str, hint: str = "") -> Problem:
        at = self._in_file(path)
        return (
            super().problem(path, message, hint)
            if not at
            else Problem(message, dotted(at), self.source, self.location(path).line, hint)
        )

    def _in_file(self, path: Path) -> Path:
        for length in range(len(path), 0, -1):
            if (at := self.written.get(path[:length])) is not None:
                return (*at, *path[length:])
        return ()


def is_hyp_config(found: object) -> bool:
    """Return whether the parsed file `found` is a config.yaml of hyp."""
    return isinstance(found, dict) and "kind" not in found and ("job_name" in found or "template" in found)


def import_hyp(text: str, source: str) -> Imported:
    """Return the job, and a sentence for each field of the file that a JobConfig cannot express.

    Args:
        text: content of the config.yaml.
        source: name of the file for messages.

    Raises:
        ConfigError: the file was made from another template of hyp, or its job is invalid.
    """
    read = parse(text, source)
    if read.problems or not isinstance(read.data, dict):
        raise ConfigError(read.problems or [Problem("contains no fields", source=source)])
    if (template := read.data.get("template", _TEMPLATE)) != _TEMPLATE:
        message = f"is `{template}`, but import reads only the template `{_TEMPLATE}` of hyp"
        raise ConfigError([read.problem(("template",), message, "import the config.yaml of a job")])
    # ignore empty fields, because `hyp` also writes fields that have no value
    given = {name: value for name, value in read.data.items() if value not in _EMPTY}
    for name in ("command", "args"):  # hyp also accepts a text instead of a list
        if isinstance(given.get(name), str):
            given[name] = _words_of(given[name])
    if problems := list(_wrong_forms(given, read)):
        raise ConfigError(problems)
    fields = Fields(given, read)
    config = _AsJob(source, locations=read.locations)
    notes = [str(one) for one in _read(fields, config)]
    found = import_object(config.job, config, placeholders=False)
    found.left_out += map(str, [*config.overruled, *fields.problems("is not a field of hyp that import knows")])
    if empty := [name for name, value in read.data.items() if value in _EMPTY]:
        notes.append(f"{source}: fields without a value: {', '.join(empty)}")
    notes += [
        read_as
        for name in ("template", "version")
        if name in given
        if (read_as := fields.says(name, f"{given[name]}: the file is imported as this {name} of hyp"))
    ]
    found.notes += notes
    return found


def _read(fields: Fields, config: _AsJob) -> Iterator[Problem]:
    """Build the HyperPodPyTorchJob in `config` from the file's fields; yield notes about defaults."""
    config.job |= {"apiVersion": "sagemaker.amazonaws.com/v1", "kind": _KIND}
    fields.take("template"), fields.take("version")
    config.put((*_GROUP, "name"), "pod", ())
    for name, path in _SAME.items():
        if name in fields.names():
            config.put(path, fields.take(name), (name,))
    if "runPolicy" in config.job["spec"]:
        config.put((*_RUN, "cleanPodPolicy"), "None", ())
    for at, (name, value) in enumerate(fields.take("environment", {}).items()):
        config.put((*_CONTAINER, "env", at), {"name": name, "value": value}, ("environment",))
        config.written[*_CONTAINER, "env", at, "value"] = ("environment", name)
    for name, value in fields.take("label_selector", {}).items():
        config.put((*_SELECTOR, name), value, ("label_selector", name))
    passed = "deep_health_check_passed_nodes_only"
    if passed in fields.names():
        if _is_true(fields.take(passed)):
            config.put((*_SELECTOR, labels.DEEP_HEALTH), "Passed", (passed,))
        else:
            yield fields.problem(passed, "false: this is hyp's default")
    _resources(fields, config)
    if "replicas" in config.job["spec"]["replicaSpecs"][0] and "elasticPolicy" in config.job["spec"]:
        replicas = config.job["spec"]["replicaSpecs"][0]["replicas"]
        name = "replica_count" if "replica_count" in fields.names() else "node_count"
        config.put((*_ELASTIC, "minReplicas"), replicas, (name,))
    for at, one in enumerate(fields.each("volume")):
        _volume(one, config, ("volume", at), at)
    yield from _workers(fields, config)


def _resources(fields: Fields, config: _AsJob) -> None:
    """Put the resource requests and limits into the HyperPodPyTorchJob, under Kubernetes' names."""
    kind = fields.take("accelerator_partition_type")
    if kind is not None:
        config.put((*_SELECTOR, "nvidia.com/mig.config.state"), "success", ("accelerator_partition_type",))
    machine = instance(str(fields.get("instance_type")))
    accelerator = (machine.accelerator_resource if machine else None) or "nvidia.com/gpu"
    for section, ending in (("requests", ""), ("limits", "_limit")):
        partitions = f"accelerator_partition_{'limit' if ending else 'count'}"
        for name, resource, unit in (
            (f"accelerators{ending}", accelerator, ""),
            (partitions, f"nvidia.com/{kind}", ""),
            (f"vcpu{ending}", "cpu", ""),
            (f"memory{ending}", "memory", "Gi"),
            (f"efa{ending}", labels.EFA, ""),
        ):
            if name in fields.names() and (name != partitions or kind is not None):
                value = f"{fields.take(name)}{unit}"
                config.put((*_CONTAINER, "resources", section, resource), value, (name,))


def _workers(fields: Fields, config: _AsJob) -> Iterator[Problem]:
    """Put the number of workers per node into the HyperPodPyTorchJob.

    The values `auto` and `gpu` mean one worker for each accelerator.
    """
    tasks = str(fields.take("tasks_per_node", "auto"))
    machine = instance(str(fields.get("instance_type")))
    counts = [fields.get(name) for name in ("accelerators", "accelerator_partition_count")]
    count = next((one for one in counts if one), machine.accelerators if machine else None)
    if tasks in ("auto", "gpu") and count:
        yield fields.problem("tasks_per_node", f"{tasks}: is {count}, the accelerators of a pod")
        tasks = str(count)
    config.put(("spec", "nprocPerNode"), tasks, ("tasks_per_node",))


def _volume(given: Fields, config: _AsJob, at: Path, index: int) -> None:
    name, kind = given.take("name"), given.take("type")
    source: dict[str, Any] = {"hostPath": {"path": given.take("path")}} if kind == "hostPath" else {}
    if kind == "pvc":
        source = {"persistentVolumeClaim": {"claimName": given.take("claim_name")}}
    if not source or not name:
        hint = "hyp has volumes of kind hostPath, with a path, and pvc, with a claim_name"
        raise ConfigError(
            [replace(given.problem("type" if name else "name", f"{kind} is not a kind of hyp's volumes"), hint=hint)]
        )
    mount = {"name": str(name), "mountPath": given.take("mount_path")}
    if (read_only := given.take("read_only")) is not None:
        mount["readOnly"] = _is_true(read_only)
    config.put((*_POD, "volumes", index), {"name": str(name), **source}, at)
    config.put((*_CONTAINER, "volumeMounts", index), mount, at)


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "on")


def _words_of(text: str) -> Any:
    """Split a command such as `[python, train.py]` or `python train.py` into words.

    Text that cannot be split is returned unchanged.
    """
    try:
        return yaml.safe_load(text) if text.startswith("[") else shlex.split(text)
    except (yaml.YAMLError, ValueError):
        return text


def _wrong_forms(given: Mapping[str, Any], places: Document) -> Iterator[Problem]:
    for name, value in given.items():
        kind = _FORMS.get(name)
        if kind is not None and not isinstance(value, kind):
            wanted = "a mapping" if kind is dict else "a list"
            yield places.problem((name,), f"must be {wanted}, not {str(value)[:40]!r}")
        elif kind is None and name in _SAME and isinstance(value, dict | list):
            yield places.problem((name,), "must be a single value")
        elif name == "job_name" and not re.fullmatch(DNS_LABEL, str(value)):
            hint = "write lower-case letters, digits and dashes, at most 63 characters, such as tiny-gpt"
            yield places.problem((name,), f"`{str(value)[:80]}` is not a valid name", hint)
        elif name in _NUMBERS and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", str(value)):
            yield places.problem((name,), f"must be a number, not {str(value)[:40]!r}")
        elif name == "volume" and not all(isinstance(one, dict) for one in value):
            yield places.problem((name,), "each volume must be a mapping")
