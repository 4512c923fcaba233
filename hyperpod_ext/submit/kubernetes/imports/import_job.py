"""From a file for Kubernetes back to a JobConfig: ours letter for letter, others as far as a JobConfig can say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.files.document import dotted
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.contract.spec_annotation import ANNOTATION, read_note, without_defaults
from hyperpod_ext.submit.contract.yaml_text import read_all
from hyperpod_ext.submit.kubernetes.imports.import_pod import read_pod

_TARGETS = {"HyperPodPyTorchJob": "hyperpod-eks", "PyTorchJob": "kubeflow", "TrainJob": "kubeflow"}
_CLEAN = {"All": "all", "OnlyComplete": "completed", "Running": "completed", "None": "none"}


@dataclass
class Imported:
    """What was read, and what could not be."""

    job: JobConfig
    target: str
    left_out: list[str] = field(default_factory=list)
    """What of the file a JobConfig cannot say, or what was not understood."""

    def to_yaml(self) -> str:
        """The spec as people write it: only what differs from the defaults."""
        return yaml.safe_dump(without_defaults(self.job), sort_keys=False, allow_unicode=True, width=100)


def import_job(text: str, source: str) -> Imported:
    """Read the training job among the objects of `text`.

    Raises:
        ConfigError: there is none, or what it says is no valid job; names every field.
    """
    try:
        objects = [found for found in read_all(text) if isinstance(found, dict)]
    except yaml.YAMLError as error:
        raise ConfigError([Problem(f"is not YAML: {error}", source=source)]) from None
    jobs = [found for found in objects if found.get("kind") in _TARGETS]
    if not jobs:
        kinds = ", ".join(str(found.get("kind")) for found in objects) or "nothing"
        hint = f"import reads {', '.join(_TARGETS)}"
        raise ConfigError([Problem(f"holds no training job, but {kinds}", source=source, hint=hint)])
    found = jobs[0]
    target = _TARGETS[found["kind"]]
    recorded = read_note(found.get("metadata") or {})
    if recorded is not None and _still_says(recorded, target, found):
        return Imported(recorded, target)
    reader = _Reader(source)
    document = reader.read(found)
    if recorded is not None:
        reader.left_out.append("the spec in the annotations: the file was changed after it was written")
    try:
        job = JobConfig.model_validate(document, strict=False)
    except ValidationError as error:
        problems = [Problem(str(one["msg"]), path=dotted(one["loc"]), source=source) for one in error.errors()]
        raise ConfigError(problems) from None
    return Imported(job, target, reader.left_out)


def _still_says(job: JobConfig, target: str, found: Mapping[str, Any]) -> bool:
    """Whether `job` renders to exactly this object, so that nobody has changed it since."""
    from hyperpod_ext.submit.contract.targets import get_target

    if job.image is None:
        return True  # the image was that of a cluster's region, which is not known here
    (again,) = read_all(get_target(target).render(job, None)["job.yaml"])
    return bool(again == found)


class _Reader:
    """Takes fields out of an object, one by one; what is left at the end was not understood."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.left_out: list[str] = []

    def read(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The job as a document."""
        metadata = dict(found.get("metadata") or {})
        spec = dict(found.get("spec") or {})
        document: dict[str, Any] = {"name": str(metadata.pop("name", "")), "mode": "plain"}
        kubernetes: dict[str, Any] = {}
        if namespace := metadata.pop("namespace", None):
            kubernetes["namespace"] = namespace
        scheduling: dict[str, Any] = {}
        self._labels(metadata, document, scheduling)
        workers = str(spec.pop("nprocPerNode", "auto"))
        if workers.isdecimal():
            document["workers_per_node"] = int(workers)
        self._run_policy(dict(spec.pop("runPolicy", None) or {}), document, kubernetes)
        self._elastic(dict(spec.pop("elasticPolicy", None) or {}), document)
        pods = self._replicas(spec, document)
        read_pod(pods, document, scheduling, kubernetes, self.left_out)
        if scheduling:
            document["scheduling"] = scheduling
        if kubernetes:
            document["kubernetes"] = kubernetes
        self._leave("metadata", metadata)
        self._leave("spec", spec)
        return document

    def _leave(self, where: str, rest: Mapping[str, Any]) -> None:
        self.left_out += [f"{where}.{name}" for name, value in rest.items() if value not in (None, {}, [])]

    def _labels(self, metadata: dict[str, Any], document: dict[str, Any], scheduling: dict[str, Any]) -> None:
        found = dict(metadata.pop("labels", None) or {})
        for label, name in ((labels.QUEUE, "queue"), (labels.PRIORITY, "priority")):
            if label in found:
                scheduling[name] = found.pop(label)
        found.pop(labels.MANAGED_BY, None)
        found.pop(labels.JOB, None)
        if found:
            document["labels"] = found
        notes = dict(metadata.pop("annotations", None) or {})
        notes.pop(ANNOTATION, None)
        for annotation, required in ((labels.TOPOLOGY_REQUIRED, True), (labels.TOPOLOGY_PREFERRED, False)):
            if annotation in notes:
                scheduling["topology"] = {"level": notes.pop(annotation), "required": required}
        notes.pop(labels.AUTO_RESUME, None)
        if again := notes.pop(labels.MAX_RETRIES, None):
            document["relaunch"] = {"max_times": int(again)}
        if notes:
            document["annotations"] = {key: str(value) for key, value in notes.items()}

    def _run_policy(self, policy: dict[str, Any], document: dict[str, Any], kubernetes: dict[str, Any]) -> None:
        restart = dict(policy.pop("restartPolicy", None) or {})
        again: dict[str, Any] = document.setdefault("relaunch", {})
        timeouts: dict[str, Any] = {}
        for holder, into, names in (
            (restart, again, {"evalPeriodSeconds": "window_s", "numRestartBeforeFullJobRestart": "after_restarts"}),
            (restart, again, {"maxFullJobRestarts": "max_times", "maxNumRepeatOffendersToAvoid": "avoid_nodes"}),
            (restart, again, {"scaleUpSnoozeTimeInSeconds": "scale_up_pause_s"}),
            (policy, again, {"jobMaxRetryCount": "max_process_restarts", "backoffLimit": "max_times"}),
            (policy, timeouts, {"activeDeadlineSeconds": "run_s", "startupDeadlineSeconds": "start_s"}),
            (policy, timeouts, {"faultDeadlineSeconds": "fault_s", "ttlSecondsAfterFinished": "keep_s"}),
            (policy, kubernetes, {"suspend": "suspend", "workloadMode": "workload_mode"}),
        ):
            for theirs, ours in names.items():
                if theirs in holder:
                    into[ours] = holder.pop(theirs)
        if timeouts.get("keep_s") == -1:
            del timeouts["keep_s"]
        if clean := policy.pop("cleanPodPolicy", None):
            kubernetes["clean_pods"] = _CLEAN.get(clean, clean)
        rules = [_log_rule(one) for one in policy.pop("logMonitoringConfiguration", None) or []]
        for name, value in (("relaunch", again), ("timeouts", timeouts), ("log_rules", rules)):
            document.pop(name, None)
            if value:
                document[name] = value
        self._leave("spec.runPolicy.restartPolicy", restart)
        self._leave("spec.runPolicy", policy)

    def _elastic(self, policy: dict[str, Any], document: dict[str, Any]) -> None:
        names = {
            "minReplicas": "min_nodes",
            "maxReplicas": "max_nodes",
            "replicaIncrementStep": "step",
            "replicaDiscreteValues": "sizes",
            "scalingTimeoutInSeconds": "scaling_timeout_s",
            "gracefulShutdownTimeoutInSeconds": "graceful_shutdown_s",
            "faultyScaleDownTimeoutInSeconds": "faulty_scale_down_s",
        }
        found = {ours: policy.pop(theirs) for theirs, ours in names.items() if theirs in policy}
        if found:
            document["elastic"] = found
        self._leave("spec.elasticPolicy", policy)

    def _replicas(self, spec: dict[str, Any], document: dict[str, Any]) -> list[dict[str, Any]]:
        """The pod templates; nodes, spares and groups go into the document."""
        if roles := spec.pop("pytorchReplicaSpecs", None):
            document["nodes"] = sum(int(role.get("replicas", 1)) for role in roles.values())
            return [dict(role.get("template") or {}) for role in roles.values()]
        groups = [dict(one) for one in spec.pop("replicaSpecs", None) or []]
        document["nodes"] = sum(int(group.get("replicas", 0)) for group in groups)
        if len(groups) == 1:
            if spares := groups[0].get("spares"):
                document["spares"] = spares
        else:
            document["node_groups"] = [_group(group) for group in groups]
        return [dict(group.get("template") or {}) for group in groups]


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    pod = (group.get("template") or {}).get("spec") or {}
    found = {
        "name": group.get("name"),
        "nodes": group.get("replicas", 0),
        "max_nodes": group.get("maxReplicas"),
        "spares": group.get("spares", 0),
        "pod_priority_class": pod.get("priorityClassName"),
        "instance_type": (pod.get("nodeSelector") or {}).get(labels.INSTANCE_TYPE),
    }
    return {name: value for name, value in found.items() if value is not None}


def _log_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "name": "name",
        "logPattern": "pattern",
        "stopPattern": "stop_pattern",
        "expectedStartCutOffInSeconds": "first_within_s",
        "expectedRecurringFrequencyInSeconds": "every_s",
        "metricThreshold": "threshold",
        "operator": "operator",
        "metricEvaluationDataPoints": "data_points",
        "faultOnMatch": "fault_on_match",
    }
    return {names[key]: value for key, value in rule.items() if key in names}
