"""Applies `overlay.kubernetes` to a rendered file, and adds comments that name the patched fields. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import KubernetesOverlay
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.jobs.contract.rank_variables import is_of_ranks
from hyperpod_ext.jobs.contract.yaml_text import read_all, to_yaml
from hyperpod_ext.jobs.kubernetes.overlays import check
from hyperpod_ext.jobs.kubernetes.overlays.merge import merged

MARK = "# from overlay.kubernetes: "
_IMAGE_OF_THE_CLUSTER = "image-of-the-cluster"
_PATCHED = "PodSpecPatch"
Render = Callable[[JobConfig], Mapping[str, str]]
CheckObject = Callable[[str, object], list[Problem]]


def with_overlay(text: str, job: JobConfig) -> str:
    """Return `text`, the rendered file of a job, with the job's overlay applied."""
    overlay = job.overlay.kubernetes
    (found,) = read_all(text)
    for pod in _pods(found):
        first, *others = pod.get("containers") or [{}]
        changed = merged(pod | {"containers": [merged(first, overlay.container), *others]}, overlay.pod)
        pod.clear()
        pod.update(changed)
    head = [line for line in text.splitlines() if line.startswith("#")]
    marks = [f"{MARK}{path}" for path in touched(overlay)]
    return "\n".join([*head, *marks, to_yaml(merged(found, overlay.job)), ""])


def touched(overlay: KubernetesOverlay) -> Iterator[str]:
    """Yield the path of each field that the overlay patches, such as `container.lifecycle` or `job.spec.runPolicy`."""
    yield from (f"container.{name}" for name in overlay.container)
    yield from (f"pod.{name}" for name in overlay.pod)
    for name, value in overlay.job.items():
        below = value if isinstance(value, Mapping) else {}
        yield from (f"job.{name}.{inner}" for inner in below) if below else iter([f"job.{name}"])


def problems(job: JobConfig, container: str, render: Render, check_object: CheckObject) -> Iterator[Problem]:
    """Yield problems of the overlay of `job`, and of the object that is rendered with the overlay.

    Args:
        container: name of the training container.
        render: renders the files of a job.
        check_object: returns the problems of an object, given the name of the object's file and the object.
    """
    shown = job if job.image else job.model_copy(update={"image": _IMAGE_OF_THE_CLUSTER})
    plain = shown.model_copy(update={"overlay": type(job.overlay)()})
    (before,) = read_all(render(plain)["job.yaml"])
    kind = _PATCHED if before["kind"] == "TrainJob" else "PodSpec"
    found = list(check.problems(job, container, kind))
    yield from found
    if found:
        return
    try:
        (after,) = read_all(render(shown)["job.yaml"])
    except ConfigError as error:
        yield from error.problems
        return
    unknown = check_object("", after)
    for problem in unknown:
        path = _place(job.overlay.kubernetes, problem.path)
        if "replicaSpecs" in problem.path and problem.path.endswith(".template"):
            # the problem is in an item of `replicaSpecs` that the overlay has added
            hint = f"write name: {' or '.join(one['name'] for one in before['spec']['replicaSpecs'])}"
            yield Problem("has an item whose name no replica spec of the job has", path=path, hint=hint)
            continue
        where = "" if path.endswith(problem.path) else f"{problem.path}: "
        yield Problem(f"{where}{problem.message}", path=path, hint=problem.hint)
    if not unknown and _relied_on(before) != _relied_on(after):
        message = "would change the job's command, its variables, its secret or its number of ranks"
        yield Problem(message, path="overlay.kubernetes", hint="`hp-ext render` without the overlay shows them")


def _place(overlay: KubernetesOverlay, path: str) -> str:
    """Return the field of the overlay that sets the field at `path` of the rendered object.

    If the overlay does not set exactly this field, return a parent field or `overlay.kubernetes.pod`.
    """
    parts, here = path.split("."), "overlay.kubernetes.job"
    below: Any = overlay.job
    for part in parts:
        if not isinstance(below, Mapping) or part not in below:
            break
        here, below = f"{here}.{part}", below[part]
    return here if here != "overlay.kubernetes.job" or overlay.job else "overlay.kubernetes.pod"


def _pods(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the PodSpecs in the object of a HyperPodPyTorchJob, PyTorchJob or TrainJob."""
    spec = found["spec"]
    for group in spec.get("replicaSpecs") or []:
        yield group["template"]["spec"]
    for role in (spec.get("pytorchReplicaSpecs") or {}).values():
        yield role["template"]["spec"]
    for patch in spec.get("runtimePatches") or []:
        for one in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            yield one["template"]["spec"]["template"]["spec"]


def _relied_on(found: Mapping[str, Any]) -> Any:
    """Return the values of the object's fields that no overlay may change."""
    spec, metadata = found["spec"], found["metadata"]
    groups = spec.get("replicaSpecs") or list((spec.get("pytorchReplicaSpecs") or {}).values())
    counts = [{name: one.get(name) for name in ("name", "replicas", "maxReplicas", "spares")} for one in groups]
    return [
        *(found["apiVersion"], found["kind"], metadata["name"], metadata.get("namespace"), spec.get("nprocPerNode")),
        *(spec.get("trainer"), counts, [_relied_on_of(pod) for pod in _pods(found)]),
    ]


def _relied_on_of(pod: Mapping[str, Any]) -> Any:
    first = pod["containers"][0]
    variables = [one for one in first.get("env") or [] if is_of_ranks(str(one.get("name")))]
    secret = [one for one in pod.get("volumes") or [] if one.get("name") == labels.SECRET_VOLUME]
    mount = [one for one in first.get("volumeMounts") or [] if one.get("name") == labels.SECRET_VOLUME]
    ports = {one.get("containerPort") for one in first.get("ports") or []} & {labels.AGENT_PORT}
    start = [first.get(name) for name in ("name", "image", "command", "args")]
    return [start, variables, secret, mount, ports]
