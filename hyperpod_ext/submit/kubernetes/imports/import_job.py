"""From a file for Kubernetes back to a JobConfig: ours letter for letter, others as far as a JobConfig can say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from pydantic import ValidationError

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.files.document import Document, Path, dotted, parse_all
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.contract.spec_annotation import ANNOTATION, read_note, without_defaults
from hyperpod_ext.submit.contract.yaml_text import read_all
from hyperpod_ext.submit.imports.placeholders import fill
from hyperpod_ext.submit.kubernetes.imports.carry import carried
from hyperpod_ext.submit.kubernetes.imports.compare import differences
from hyperpod_ext.submit.kubernetes.imports.import_pod import read_pod
from hyperpod_ext.submit.kubernetes.imports.shape import Shape

_TARGETS = {"HyperPodPyTorchJob": "hyperpod-eks", "PyTorchJob": "kubeflow", "TrainJob": "kubeflow"}
_SERVICE = "an inference service"
_NO_TRAINING = {
    "InferenceService": _SERVICE,
    "InferenceEndpointConfig": _SERVICE,
    "JumpStartModel": _SERVICE,
    "RayService": _SERVICE,
    "LeaderWorkerSet": _SERVICE,
    "Deployment": "a service that keeps running",
    "StatefulSet": "a service that keeps running",
    "DaemonSet": "a service of every node",
    "Job": "a batch job of Kubernetes, such as data preparation or a test",
    "CronJob": "a batch job of Kubernetes, such as data preparation or a test",
    "Pod": "a single pod",
    "MPIJob": "a job of MPI, whose workers mpirun starts",
    "RayJob": "a job of Ray, which starts its own workers",
    "RayCluster": "a cluster of Ray",
    "Workflow": "a workflow of several steps",
}
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


def import_job(text: str, source: str, values: Mapping[str, Any] | None = None) -> Imported:
    """Read the training job among the objects of `text`, a template whose placeholders `values` fill.

    Raises:
        ConfigError: there is none, or what it says is no valid job; names every field.
    """
    notes: list[Problem] = []
    if ANNOTATION not in text:  # ours is no template: its shell has variables of its own
        text, notes = fill(text, values or {}, source)
    documents = parse_all(text, source)
    if problems := [problem for document in documents for problem in document.problems]:
        raise ConfigError(problems)
    objects = [found for document in documents for found in _objects(document, document.data, ())]
    jobs = [found for found in objects if str(found[2].get("kind")) in _TARGETS]
    if not jobs:
        raise ConfigError([_no_job(objects, source)])
    (document, path, found), target = jobs[0], _TARGETS[str(jobs[0][2]["kind"])]
    metadata = found.get("metadata")
    recorded = read_note(metadata) if isinstance(metadata, dict) else None
    if recorded is not None and _still_says(recorded, target, found):
        return Imported(recorded, target)
    shape = Shape(document)
    found = shape.read(found, path)
    if shape.problems:
        raise ConfigError(list(dict.fromkeys(shape.problems)))
    reader = _Reader(source)
    job = carried(_job(reader.read(found), source), target, found)
    variables = {str(one.get("name")) for one in _items(job.overlay.kubernetes.container.get("env"))}
    reader.left_out = [text for text in reader.left_out if not _is_carried(text, variables)]
    left = [str(one) for one in (*notes, *shape.notes)] + [
        f"{source}:{_line_of(text, document, path)}: {text}" for text in reader.left_out
    ]
    if recorded is not None:
        left.append(f"{source}: the spec in the annotations: the file was changed after it was written")
    left += [str(one) for one in differences(found, _rendered(job, target), _below(document, path))]
    for other, at, one in objects:
        if one is not jobs[0][2]:
            name = (one.get("metadata") or {}).get("name") if isinstance(one.get("metadata"), dict) else None
            message = f"{one.get('kind')} {name}: another object of the file; a spec is one job, so apply it beside it"
            left.append(f"{source}:{other.location(at).line}: {message}")
    return Imported(job, target, list(dict.fromkeys(left)))


def _items(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _is_carried(text: str, variables: set[str]) -> bool:
    """Whether a loss is none any more: the overlay has this variable."""
    return any(text.startswith(f"variable {name}: its value comes from") for name in variables)


def _job(document: dict[str, Any], source: str) -> JobConfig:
    try:
        return JobConfig.model_validate(document, strict=False)
    except ValidationError as error:
        problems = [Problem(str(one["msg"]), path=dotted(one["loc"]), source=source) for one in error.errors()]
        raise ConfigError(problems) from None


def _rendered(job: JobConfig, target: str) -> dict[str, Any]:
    from hyperpod_ext.submit.contract.targets import get_target

    shown = job if job.image else job.model_copy(update={"image": "image-of-the-cluster"})
    (found,) = read_all(get_target(target).render(shown, None)["job.yaml"])
    return dict(found)


def _below(document: Document, path: Path) -> Document:
    """The document as if the object at `path` were all of it."""
    places = {at[len(path) :]: place for at, place in document.locations.items() if at[: len(path)] == path}
    return replace(document, locations=places)


def _line_of(text: str, document: Document, path: Path) -> int | None:
    """Where what `text` names was written: the first value that its first words are in, or the job."""
    head = text.partition(":")[2].strip() if text.startswith("a line of") else text
    words = [word.strip(":,") for word in head.split()[:3]]
    for word in [word for word in words if (len(word) > 2 and not word.islower()) or word.startswith("--")]:
        for place in document.locations.values():
            if place.text is not None and word.partition("=")[0] in place.text:
                return place.line
    return document.location(path).line


def _objects(document: Document, data: object, path: Path) -> Iterator[tuple[Document, Path, dict[str, Any]]]:
    """The objects of one document, those of lists one by one."""
    if isinstance(data, list):
        for index, one in enumerate(data):
            yield from _objects(document, one, (*path, index))
    elif isinstance(data, dict):
        items = data.get("items")
        if str(data.get("kind", "")).endswith("List") and isinstance(items, list):
            yield from _objects(document, items, (*path, "items"))
        else:
            yield document, path, data


def _no_job(objects: Sequence[tuple[Document, Path, dict[str, Any]]], source: str) -> Problem:
    """What the file is instead, and what to do."""
    kinds = list(dict.fromkeys(str(found.get("kind")) for _document, _path, found in objects if found.get("kind")))
    line = objects[0][0].location(objects[0][1]).line if objects else 1
    reads = f"import reads {', '.join(_TARGETS)}"
    for kind in kinds:
        if kind in _NO_TRAINING:
            message = f"is {_NO_TRAINING[kind]} ({kind}), no training job"
            return Problem(message, source=source, line=line, hint=f"apply it with kubectl as before; {reads}")
    if kinds:
        return Problem(f"holds no training job, but {', '.join(kinds)}", source=source, line=line, hint=reads)
    names = {str(name) for _document, _path, found in objects for name in found}
    if names & {"recipes", "trainer", "training_config", "exp_manager", "hydra"}:
        hint = "its launcher makes a job of it: import what that writes"
        return Problem("is a recipe of Hydra, no job", source=source, line=line, hint=hint)
    if names:
        hint = f"if these are values of a template, give them with --values {source}; {reads}"
        return Problem(f"holds no training job, but fields {', '.join(sorted(names)[:5])}", "", source, line, hint)
    return Problem("holds no training job, but nothing that a job is made of", source=source, line=1, hint=reads)


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
        launched = document.pop("launched_workers", None)
        if launched is not None and workers.isdecimal() and launched != int(workers):
            self.left_out.append(f"spec.nprocPerNode: {workers} here; the command says {launched}, which counts")
        if launched is None and not workers.isdecimal():
            count = document.get("resources", {}).get("accelerators")
            document["workers_per_node"] = count or 1
            self.left_out.append(f"workers_per_node: {count or 1} is taken, as nprocPerNode and the command name none")
        elif launched is not None:
            document["workers_per_node"] = launched
        nodes = document.pop("launched_nodes", None)
        if nodes is not None and nodes != str(document["nodes"]):
            self.left_out.append(f"the launcher's --nnodes={nodes}: the replicas are {document['nodes']}, which count")
        kubernetes["network_policy"] = False  # the file has none
        if scheduling:
            document["scheduling"] = scheduling
        if kubernetes:
            document["kubernetes"] = kubernetes
        return document

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
        if (again := str(notes.pop(labels.MAX_RETRIES, None) or "")) and again.isdecimal():
            document["relaunch"] = {"max_times": int(again)}
        if notes:
            document["annotations"] = {key: str(value) for key, value in notes.items()}

    def _run_policy(self, policy: dict[str, Any], document: dict[str, Any], kubernetes: dict[str, Any]) -> None:
        found = policy.pop("restartPolicy", None)
        restart = dict(found) if isinstance(found, dict) else {}
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
            kubernetes["clean_pods"] = _CLEAN.get(str(clean), str(clean))
        rules = [_log_rule(one) for one in policy.pop("logMonitoringConfiguration", None) or []]
        for name, value in (("relaunch", again), ("timeouts", timeouts), ("log_rules", rules)):
            document.pop(name, None)
            if value:
                document[name] = value

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
        if "maxRestarts" in policy:
            document.setdefault("relaunch", {})["max_process_restarts"] = policy["maxRestarts"] or None

    def _replicas(self, spec: dict[str, Any], document: dict[str, Any]) -> list[dict[str, Any]]:
        """The pod templates; nodes, spares and groups go into the document."""
        if trainer := spec.get("trainer"):
            document["nodes"] = trainer.get("numNodes", 1)
            container = {k: v for k, v in trainer.items() if k in ("image", "command", "args", "env")}
            container["resources"] = trainer.get("resourcesPerNode") or {}
            if str(trainer.get("numProcPerNode", "")).isdecimal():
                document["launched_workers"] = int(trainer["numProcPerNode"])
            return [{"spec": {"containers": [container]}}]
        if roles := spec.pop("pytorchReplicaSpecs", None):
            document["nodes"] = sum(int(role.get("replicas", 1)) for role in _roles(roles))
            return [dict(role.get("template") or {}) for role in _roles(roles)]
        groups = [dict(one) for one in spec.pop("replicaSpecs", None) or []]
        if not groups:
            self.left_out.append("spec: names no replicas; nodes is 1")
        document["nodes"] = sum(int(group.get("replicas", 0)) for group in groups) or 1
        if len(groups) == 0:
            return [{}]
        if len(groups) == 1:
            if spares := groups[0].get("spares"):
                document["spares"] = spares
        else:
            document["node_groups"] = [_group(group) for group in groups]
        return [dict(group.get("template") or {}) for group in groups]


def _roles(roles: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [role for role in roles.values() if isinstance(role, dict)]


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
