"""Imports a Kubernetes file as a JobConfig.

A file that hp-ext rendered contains its spec, which is returned. From any other file, the parts that a spec can express
are imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml
from pydantic import ValidationError

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.files.document import Document, Path, parse_all
from hyperpod_ext.config.files.error_messages import problems_of
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.contract.spec_annotation import ANNOTATION
from hyperpod_ext.jobs.contract.yaml_text import read_all
from hyperpod_ext.jobs.imports.placeholders import fill
from hyperpod_ext.jobs.imports.report import Imported
from hyperpod_ext.jobs.kubernetes.hyperpod_eks_render import ELASTIC, LIMITS, LOG_RULE, RESTARTS
from hyperpod_ext.jobs.kubernetes.imports.carry import carried, is_carried, trainer_pod, with_job_fields
from hyperpod_ext.jobs.kubernetes.imports.changed import read_changed, recorded_in
from hyperpod_ext.jobs.kubernetes.imports.compare import additions, differences, groups_of, renamed
from hyperpod_ext.jobs.kubernetes.imports.import_pod import is_machine, read_pod
from hyperpod_ext.jobs.kubernetes.imports.shape import Shape, fields_in, mappings

_OF_THE_COMMAND = (
    "a line of the shell",
    "of the shell",
    "the launcher",
    "the words",
    "the folder",
    "export ",
    "workers_per",
)
"""Beginnings of sentences about lost parts of the container's command."""
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
    "MPIJob": "a job whose workers mpirun starts",
    "RayJob": "a job whose workers Ray starts",
    "RayCluster": "a cluster of Ray",
    "Workflow": "a workflow with several steps",
    "JobSet": "a set of batch jobs, each with its own command",
    "TFJob": "a job of TensorFlow",
    "JAXJob": "a job of JAX",
    "XGBoostJob": "a job of XGBoost",
    "PaddleJob": "a job of PaddlePaddle",
    "TrainingRuntime": "a runtime that TrainJobs refer to",
    "ClusterTrainingRuntime": "a runtime that TrainJobs refer to",
    "WorkflowTemplate": "a workflow with several steps",
    "CronWorkflow": "a workflow with several steps",
    "PipelineRun": "a workflow with several steps",
    "Workspace": "a workspace for notebooks",
    "Notebook": "a workspace for notebooks",
    "Kustomization": "a kustomization, which combines objects",
}
_OTHER_JOBS = {"MPIJob", "RayJob", "JobSet", "TFJob", "JAXJob", "XGBoostJob", "PaddleJob", "Job", "CronJob", "Pod"}
"""Kinds of objects that may train a model, but that no target supports."""
_VOLCANO = "batch.volcano.sh/"
_OF_SERVER = {"uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink"}
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_SAME_VALUE = " was replaced by its value "
"""Words in each message about a variable whose references the import has replaced with values."""
_OF_RUNTIMES = {"kind": "ClusterTrainingRuntime", "apiGroup": "trainer.kubeflow.org"}
_IMAGE_OF_THE_CLUSTER = "image-of-the-cluster"
_CLEAN = {"All": "all", "OnlyComplete": "completed", "Running": "completed", "None": "none"}


def import_job(text: str, source: str, values: Mapping[str, Any] | None = None) -> Imported:
    """Return the first training job among the objects of a file, and a sentence for each lost setting.

    Args:
        text: content of the file, which may be a template.
        source: name of the file for messages.
        values: values of the template's placeholders.

    Raises:
        ConfigError: the file has no training job, or the job is invalid. The error names every invalid field.
    """
    notes: list[Problem] = []
    if (ours := _letter_for_letter(text)) is not None:
        return ours
    if ANNOTATION not in text:  # in a file that hp-ext rendered, `$NAME` is a shell variable
        text, notes = fill(text, values or {}, source)
    documents = parse_all(text, source)
    if problems := [problem for document in documents for problem in document.problems]:
        raise ConfigError(problems)
    objects = [found for document in documents for found in _objects(document, document.data, ())]
    jobs = [found for found in objects if str(found[2].get("kind")) in _TARGETS]
    if not jobs:
        raise ConfigError([_no_job(objects, source), *notes])  # `notes` names missing values of placeholders
    document, path, found = jobs[0]
    imported = import_object(found, _below(document, path), placeholders=ANNOTATION not in text)
    imported.left_out = list(dict.fromkeys([*map(str, notes), *imported.left_out]))
    for other, at, one in objects:
        if one is not found:
            name = (one.get("metadata") or {}).get("name") if isinstance(one.get("metadata"), dict) else None
            message = f"{one.get('kind')} {name}: is another object of the file ({fields_in(one)} fields)"
            where = other.location(at).line
            imported.left_out.append(
                f"{source}:{where}: {message}; a spec describes one job, so apply this object separately"
            )
    return imported


def import_object(found: dict[str, Any], document: Document, *, placeholders: bool = True) -> Imported:
    """Return the job in one object, and a sentence for each lost setting.

    Args:
        document: the file of the object, for line numbers.
        placeholders: whether `$NAME` in the object is a placeholder without a value.

    Raises:
        ConfigError: the job is invalid. The error names every invalid field.
    """
    target, source = _TARGETS[str(found["kind"])], document.source
    found = _as_written(found)
    metadata = found.get("metadata")
    recorded = recorded_in(found) if isinstance(metadata, dict) else None
    if recorded is not None and _still_says(recorded, target, found):
        return Imported(recorded, target)
    found = _without_defaults(found)
    shape = Shape(document, placeholders=placeholders and recorded is None)
    found = shape.read(found)
    if shape.problems:
        raise ConfigError(list(dict.fromkeys(shape.problems)))
    if recorded is not None:
        job, left = read_changed(recorded, found, lambda job: _rendered(job, target), document)
        return Imported(job, target, [one for one in left if _IMAGE_OF_THE_CLUSTER not in one])
    reader = _Reader(source)
    job = carried(_job(reader.read(found), source), target, found)
    reader.left_out = [text for text in reader.left_out if not is_carried(text, job)]
    left, notes = (
        [f"{source}:{_line_of(text, document)}: {text}" for text in texts] for texts in (reader.left_out, reader.notes)
    )
    left = [*map(str, shape.notes), *left]
    job = with_job_fields(job, target, found, _rendered(job, target))
    rendered = _rendered(job, target)
    workers = (
        {document.problem(("spec", "nprocPerNode"), "").path} if any("nprocPerNode: " in one for one in left) else ()
    )
    left += [
        str(one)
        for one in differences(found, rendered, document)
        if one.path not in workers and _IMAGE_OF_THE_CLUSTER not in one.message
    ]
    if job.image is None:
        left.append(f"{source}:{document.location(()).line}: image: the file has no image; set `image` in the spec")
    same = [one for one in left if _SAME_VALUE in one]
    left = [one for one in left if _SAME_VALUE not in one]
    more = [str(one) for of in (renamed, additions) for one in of(found, rendered, document)]
    return Imported(job, target, list(dict.fromkeys(left)), list(dict.fromkeys([*same, *notes, *more])))


def _as_written(found: dict[str, Any]) -> dict[str, Any]:
    """Return the object without the fields that the API server has added to it."""
    kept = {name: value for name, value in found.items() if name != "status"}
    if isinstance(metadata := kept.get("metadata"), dict):
        metadata = {name: value for name, value in metadata.items() if name not in _OF_SERVER}
        if isinstance(notes := metadata.get("annotations"), dict):
            metadata["annotations"] = {name: value for name, value in notes.items() if name != _LAST_APPLIED}
        kept["metadata"] = metadata
    return kept


def _without_defaults(found: dict[str, Any]) -> dict[str, Any]:
    """Return the object without fields of a TrainJob's runtimeRef that have their default value."""
    spec = found.get("spec")
    runtime = spec.get("runtimeRef") if isinstance(spec, dict) else None
    if found.get("kind") != "TrainJob" or not isinstance(spec, dict) or not isinstance(runtime, dict):
        return found
    kept = {name: value for name, value in runtime.items() if _OF_RUNTIMES.get(name) != value}
    return {**found, "spec": {**spec, "runtimeRef": kept}}


def _job(document: dict[str, Any], source: str) -> JobConfig:
    try:
        return JobConfig.model_validate(document, strict=False)
    except ValidationError as error:
        raise ConfigError([*problems_of(error, JobConfig, source, document)]) from None


def _rendered(job: JobConfig, target: str) -> dict[str, Any]:
    shown = job if job.image else job.model_copy(update={"image": _IMAGE_OF_THE_CLUSTER})
    (found,) = read_all(_rendered_text(shown, target))
    return dict(found)


def _rendered_text(job: JobConfig, target: str) -> str:
    from hyperpod_ext.jobs.contract.targets import get_target

    return get_target(target).render(job, None)["job.yaml"]


def _below(document: Document, path: Path) -> Document:
    """Return a copy of the document whose root is the object at `path`."""
    places = {at[len(path) :]: place for at, place in document.locations.items() if at[: len(path)] == path}
    return replace(document, locations=places)


def _line_of(text: str, document: Document) -> int | None:
    """Return the line of the file to which a sentence about a lost setting refers.

    The result is the line of the first value that contains one of the sentence's first words, or else the job's line.
    """
    head = text.partition(":")[2].strip() if text.startswith("a line of") else text
    words = [word.strip(":,") for word in head.split()[:3]]
    if text.startswith(_OF_THE_COMMAND):
        places = [place for at, place in document.locations.items() if at and at[-1] in ("command", "args")]
        if places:
            return places[0].line
    for word in [word for word in words if (len(word) > 2 and not word.islower()) or word.startswith("--")]:
        name = word.partition("=")[0]
        for place in document.locations.values():
            if place.text is not None and (name in place.text or name in place.text.replace("_", "-")):
                return place.line
    return document.location(()).line


def _objects(document: Document, data: object, path: Path) -> Iterator[tuple[Document, Path, dict[str, Any]]]:
    """Yield the Kubernetes objects of one YAML document, including the items of lists."""
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
    """Return the problem that explains why a file has no training job that can be imported."""
    kinds = list(dict.fromkeys(str(found.get("kind")) for _document, _path, found in objects if found.get("kind")))
    line = objects[0][0].location(objects[0][1]).line if objects else 1
    reads = f"import reads {', '.join(_TARGETS)}"
    for kind in kinds:
        what = _NO_TRAINING.get(kind)
        if what is None:
            continue
        hint = f"apply it with kubectl as before; {reads}"
        if kind == "Kustomization":
            hint = "import its result: kubectl kustomize DIR | hp-ext import -"
        if kind == "Job" and any(str(one.get("apiVersion")).startswith(_VOLCANO) for _document, _path, one in objects):
            what = "a job of Volcano"
        message = f"is {what} ({kind}), not a training job"
        if kind in _OTHER_JOBS:
            message = f"is {what} ({kind}), and no target supports this kind"
        if kind in _OTHER_JOBS - {"MPIJob", "RayJob"}:  # a spec's command runs once on each node
            hint = f"apply it with kubectl as before, or write a spec with its image and command; {reads}"
        return Problem(message, source=source, line=line, hint=hint)
    if kinds:
        return Problem(f"has no training job, only {', '.join(kinds)}", source=source, line=line, hint=reads)
    names = {str(name) for _document, _path, found in objects for name in found}
    if names & {"recipes", "trainer", "training_config", "exp_manager", "hydra"}:
        hint = "its launcher creates a job from it: import that job"
        return Problem("is a recipe of Hydra, not a job", source=source, line=line, hint=hint)
    if names:
        hint = f"if the file has values of a template, use --values {source}; {reads}"
        fields = ("fields " if len(names) > 1 else "field ") + ", ".join(f"`{name}`" for name in sorted(names)[:5])
        return Problem(f"has no training job, only the {fields}", "", source, line, hint)
    return Problem("contains no training job", source=source, line=1, hint=reads)


def _letter_for_letter(text: str) -> Imported | None:
    """Return the job of a file that hp-ext rendered and nobody edited; None for other files.

    This function is faster than the import of other files, which parses the file with line numbers.
    """
    if ANNOTATION not in text:
        return None
    try:
        found = read_all(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    if len(found) != 1 or not isinstance(found[0], dict) or not isinstance(found[0].get("metadata"), dict):
        return None
    job, target = recorded_in(found[0]), _TARGETS.get(str(found[0].get("kind")))
    if job is None or target is None or job.image is None:
        return None
    return Imported(job, target) if _rendered_text(job, target) == text else None


def _still_says(job: JobConfig, target: str, found: Mapping[str, Any]) -> bool:
    """Return whether `job` renders to exactly the object `found`.

    If `job` sets no image, the image and the annotation with the spec may differ.
    """
    again = _rendered(job, target)
    if job.image is None:  # do not compare the image: it depends on the cluster's region, which is unknown
        for ours, theirs in zip(_first_containers(again), _first_containers(found), strict=False):
            ours["image"] = theirs.get("image")
        again["metadata"]["annotations"][ANNOTATION] = found["metadata"]["annotations"][ANNOTATION]
    return again == found


def _first_containers(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for _name, _path, group in groups_of(found):
        yield from mappings(((group.get("template") or {}).get("spec") or {}).get("containers"))[:1]


class _Reader:
    """Reads the fields of a Kubernetes object into a spec."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.left_out: list[str] = []
        self.notes: list[str] = []

    def read(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the spec of the job in the object `found`, as a dictionary."""
        metadata = dict(found.get("metadata") or {})
        spec = dict(found.get("spec") or {})
        name = metadata.pop("name", "") or str(metadata.get("generateName", "")).rstrip("-")
        document: dict[str, Any] = {"name": str(name), "mode": "plain"}
        kubernetes: dict[str, Any] = {}
        if found.get("kind") == "TrainJob":
            kubernetes["kubeflow_api"] = "trainjob"
            if runtime := (spec.get("runtimeRef") or {}).get("name"):
                kubernetes["training_runtime"] = runtime
            if "activeDeadlineSeconds" in spec:
                document["timeouts"] = {"run_s": spec["activeDeadlineSeconds"]}
            if spec.get("suspend"):
                kubernetes["suspend"] = True
        if namespace := metadata.pop("namespace", None):
            kubernetes["namespace"] = namespace
        scheduling: dict[str, Any] = {}
        self._labels(metadata, document, scheduling)
        workers = str(spec.pop("nprocPerNode", "auto"))
        if workers.isdecimal():
            document["workers_per_node"] = int(workers)
        # in Kubeflow's operator, the default of a PyTorchJob's `cleanPodPolicy` is None
        default_clean = "None" if found.get("kind") == "PyTorchJob" else None
        self._run_policy(dict(spec.pop("runPolicy", None) or {}), document, kubernetes, default_clean)
        raw = "pytorchReplicaSpecs" in spec and not spec.get("elasticPolicy")
        self._elastic(dict(spec.pop("elasticPolicy", None) or {}), document)
        pods = self._replicas(spec, document)
        self._pod_labels(pods, document)
        read_pod(pods, document, scheduling, kubernetes, self.left_out, self.notes, raw)
        launched = document.pop("launched_workers", None)
        if launched is not None and workers.isdecimal() and launched != int(workers):
            self.left_out.append(
                f"spec.nprocPerNode: is {workers}, but the command sets {launched}, which takes precedence"
            )
        if launched is None and not workers.isdecimal():
            count = document.get("resources", {}).get("accelerators")
            document["workers_per_node"] = count or 1
            self.left_out.append(
                f"workers_per_node: is {count or 1} by default; neither nprocPerNode nor the command sets it"
            )
        elif launched is not None:
            document["workers_per_node"] = launched
        nodes = document.pop("launched_nodes", None)
        if nodes is not None and nodes != str(document["nodes"]):
            self.left_out.append(f"the launcher's --nnodes={nodes}: ignored; the file has {document['nodes']} replicas")
        least = document.pop("launched_least", None)
        if least is not None and "elastic" not in document:
            count = document["nodes"]
            self.left_out.append(f"the launcher's --nnodes={least}:{nodes}: the rendered job has exactly {count} nodes")
        kubernetes["network_policy"] = False  # the imported file has no network policy, so the spec must disable it
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
        again = str(notes.get(labels.MAX_RETRIES) or "")
        if again.isdecimal() and str(notes.get(labels.AUTO_RESUME)).lower() == "true":
            document["relaunch"] = {"max_times": int(again)}
            del notes[labels.MAX_RETRIES], notes[labels.AUTO_RESUME]
        if notes:
            document["annotations"] = {key: str(value) for key, value in notes.items()}

    def _pod_labels(self, pods: list[dict[str, Any]], document: dict[str, Any]) -> None:
        """Add the labels and annotations of pods to the spec's labels and annotations.

        A spec has the same labels and annotations for the job and its pods.
        """
        own = {labels.QUEUE, labels.PRIORITY, labels.MANAGED_BY, labels.JOB}
        own |= {labels.TOPOLOGY_REQUIRED, labels.TOPOLOGY_PREFERRED}
        for section in ("labels", "annotations"):
            found = (pods[0].get("metadata") or {}).get(section) if pods else None
            for name, value in (found or {}).items():
                if name not in own:
                    document.setdefault(section, {}).setdefault(name, str(value))

    def _run_policy(
        self, policy: dict[str, Any], document: dict[str, Any], kubernetes: dict[str, Any], default_clean: str | None
    ) -> None:
        found = policy.pop("restartPolicy", None)
        restart = dict(found) if isinstance(found, dict) else {}
        again: dict[str, Any] = document.setdefault("relaunch", {})
        timeouts: dict[str, Any] = {}
        for holder, into, names in (
            (restart, again, RESTARTS),
            (policy, again, {"jobMaxRetryCount": "max_process_restarts", "backoffLimit": "max_times"}),
            (policy, timeouts, LIMITS | {"ttlSecondsAfterFinished": "keep_s"}),
            (policy, kubernetes, {"suspend": "suspend", "workloadMode": "workload_mode"}),
        ):
            for theirs, ours in names.items():
                if theirs in holder:
                    into[ours] = holder.pop(theirs)
        if timeouts.get("keep_s") == -1:
            del timeouts["keep_s"]
        if clean := policy.pop("cleanPodPolicy", default_clean):
            kubernetes["clean_pods"] = _CLEAN.get(str(clean), str(clean))
        rules = [
            {LOG_RULE[key]: value for key, value in rule.items() if key in LOG_RULE}
            for rule in policy.pop("logMonitoringConfiguration", None) or []
        ]
        for name, value in (("relaunch", again), ("timeouts", timeouts), ("log_rules", rules)):
            if name != "timeouts":
                document.pop(name, None)
            if value:
                document[name] = value

    def _elastic(self, policy: dict[str, Any], document: dict[str, Any]) -> None:
        found = {ours: policy.pop(theirs) for theirs, ours in ELASTIC.items() if theirs in policy}
        if found:
            document["elastic"] = found
        if "maxRestarts" in policy:
            document.setdefault("relaunch", {})["max_process_restarts"] = policy["maxRestarts"] or None

    def _replicas(self, spec: dict[str, Any], document: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the pod templates of the job, and put the numbers of nodes and spares, and groups, into the spec."""
        if trainer := spec.get("trainer"):
            document["nodes"] = trainer.get("numNodes", 1)
            if str(trainer.get("numProcPerNode", "")).isdecimal():
                document["launched_workers"] = int(trainer["numProcPerNode"])
            return [trainer_pod(spec)]
        if roles := spec.pop("pytorchReplicaSpecs", None):
            document["nodes"] = self._counted(sum(int(role.get("replicas", 1)) for role in _roles(roles)))
            unsaid = [str(name) for name, role in roles.items() if isinstance(role, dict) and "replicas" not in role]
            self.notes += [f"{name}: has no replicas, so the default of 1 is used" for name in unsaid]
            if {role.get("restartPolicy") for role in _roles(roles)} == {"Never"}:
                # hp-ext renders max_times 0 as restartPolicy Never
                document.setdefault("relaunch", {}).setdefault("max_times", 0)
            return [dict(role.get("template") or {}) for role in _roles(roles)]
        groups = [dict(one) for one in spec.pop("replicaSpecs", None) or []]
        if not groups:
            self.left_out.append("spec: has no replicas; nodes is 1")
        document["nodes"] = self._counted(sum(int(group.get("replicas", 0)) for group in groups)) if groups else 1
        if len(groups) == 0:
            return [{}]
        if len(groups) == 1:
            if spares := groups[0].get("spares"):
                document["spares"] = spares
        else:
            document["node_groups"] = [_group(group) for group in groups]
        return [dict(group.get("template") or {}) for group in groups]

    def _counted(self, nodes: int) -> int:
        if nodes < 1:
            self.left_out.append("spec: has 0 replicas, so the job starts no pods; nodes is 1")
        return max(nodes, 1)


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
    if not is_machine(found["instance_type"]):
        del found["instance_type"]
    return {name: value for name, value in found.items() if value is not None}
