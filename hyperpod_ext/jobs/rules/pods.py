"""Rules of pods: volumes and time limits that let state outlive pods, and fields that TrainJobs or AWS's `hyp` lack."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.config.checkpoint import DurableTier
from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.volumes import ClaimVolume, HostVolume, ScratchVolume, Volume, is_below
from hyperpod_ext.jobs.kubernetes.sizes import NEW_POD_S
from hyperpod_ext.jobs.rules import KUBERNETES, Context, rule

_OF_TRAINJOB = {
    "container": ("env", "resources", "securityContext", "volumeMounts"),
    "pod": ("affinity", "schedulingGates", "securityContext", "volumes"),
}
"""Fields in sections `kubernetes.container` and `kubernetes.pod` that a TrainJob may change in its runtime's pods."""
_READ_ONLY = "which is read-only"
_GOES = "which is deleted with its pod"


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder of the container at which a volume is mounted."""

    path: str
    volume: str
    """Name of the volume for messages: its field in the spec, and its kind."""
    wrong: str = ""
    """Reason why the folder cannot keep checkpoints, as a clause that follows `volume`; empty if the folder can."""
    shared: bool = False
    """Whether all pods have the same files in the folder."""


@rule(
    "HPX128",
    "error",
    "a durable tier on storage that is deleted with the pod",
    "A tier of kind file must survive the loss of every node, a tier of kind disk the loss of every pod. A folder "
    "without a volume, or on a volume of the pod, is lost with the pod. A read-only volume cannot store checkpoints.",
    "Mount storage that all nodes share, such as `{kind: claim, path: /fsx, claim: fsx-claim}` in volumes, and "
    "choose the tier's path below it.",
)
def durable_tiers_are_on_shared_volumes(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target not in KUBERNETES or job.mode != "ours":
        return
    for index, tier in enumerate(job.checkpoint.tiers):
        if not isinstance(tier, DurableTier) or tier.mounted is None:
            continue
        at: tuple[str | int, ...] = ("checkpoint", "tiers", index)
        at += ("path",) if "path" in type(tier).model_fields else ()
        path = posixpath.normpath(posixpath.join(job.working_dir or "", tier.mounted))
        if not path.startswith("/"):
            message = f"`{tier.mounted}` is a relative path, so checkpoints would be lost with the container"
            kept = next((place.path.rstrip("/") for place in _places(job) if place.shared and not place.wrong), "/fsx")
            hint = f"write an absolute path, such as {kept}/{path}, on a volume that all nodes share"
            on_disk = f"write an absolute path on the node's disk, such as /{path}; it needs no entry in volumes"
            yield Finding(at, message, on_disk if tier.on_node else hint)
            continue
        if path == "/":
            yield Finding(at, "the root of the container is not a volume", "write a folder below the mount of a volume")
            continue
        holders = [place for place in _places(job) if is_below(path, place.path)]
        nearest = max(holders, key=lambda place: len(place.path.rstrip("/")), default=None)
        if tier.on_node:
            yield from _on_the_node(nearest, path, at)
            continue
        claim = f"{{kind: claim, path: /{path.split('/')[1] or 'fsx'}, claim: NAME}}"
        if nearest is None and not _may_be_mounted_elsewhere(job, path):
            shown = path if tier.mounted.rstrip("/") == path else f"`{tier.mounted}`, which is {path},"
            yield Finding(at, f"{shown} is not on a volume that all nodes share", f"add `{claim}` to volumes")
        elif nearest is not None and nearest.wrong:
            message = f"{path} is on {nearest.volume}, {nearest.wrong}"
            yield Finding(at, message, "write a path on a claim that is not read-only")


def _on_the_node(nearest: _Place | None, path: str, at: tuple[str | int, ...]) -> Iterator[Finding]:
    """Check a tier of kind disk, which needs a folder on each node's own disk.

    Args:
        nearest: innermost mounted folder that contains the tier; with None, hp-ext adds a volume to the pod.
        path: folder of the tier in the container.
        at: field of the spec that the report names.
    """
    if nearest is not None and (nearest.wrong or nearest.shared):
        wrong = nearest.wrong or "where all nodes would write into the same folder"
        other = "write a path on no volume, or on a writable volume of kind host"
        hint = other if nearest.wrong else f"use `kind: file`, or {other}"
        yield Finding(at, f"{path} is on {nearest.volume}, {wrong}", hint)


def _places(job: JobConfig) -> Iterator[_Place]:
    """Yield every folder that the spec mounts."""
    for index, volume in enumerate(job.volumes):
        shared = isinstance(volume, ClaimVolume)
        yield _Place(volume.path, f"volumes.{index}, of kind {volume.kind}", _wrong_with(volume), shared)
    named = {one["name"]: one for one in job.kubernetes.pod.get("volumes", ())}
    for mount in job.kubernetes.container.get("volumeMounts", ()):
        if (found := named.get(mount["name"])) is not None:  # skip mounts of unknown volumes, which HPX155 reports
            wrong = _READ_ONLY if mount.get("readOnly") else _wrong_with_named(found)
            shared = "persistentVolumeClaim" in found or "nfs" in found
            yield _Place(mount["mountPath"], f"volume `{mount['name']}` of kubernetes.pod.volumes", wrong, shared)


def _wrong_with(volume: Volume) -> str:
    match volume:
        case ClaimVolume() | HostVolume():
            return _READ_ONLY if volume.read_only else ""
        case ScratchVolume():
            return _GOES
    return _READ_ONLY


def _wrong_with_named(volume: Mapping[str, Any]) -> str:
    if "emptyDir" in volume or "ephemeral" in volume:
        return _GOES
    stores = [volume[kind] for kind in ("persistentVolumeClaim", "nfs", "csi") if kind in volume]
    written = "hostPath" in volume or any(not one.get("readOnly") for one in stores)
    return "" if written else _READ_ONLY


def _may_be_mounted_elsewhere(job: JobConfig, path: str) -> bool:
    """Return whether an overlay, or a user's TrainingRuntime, may mount a volume at `path`."""
    mounts = job.overlay.kubernetes.container.get("volumeMounts")
    for one in mounts if isinstance(mounts, list) else ():
        if isinstance(one, dict) and is_below(path, str(one.get("mountPath", ""))):
            return True
    default = type(job.kubernetes).model_fields["training_runtime"].default
    return job.kubernetes.kubeflow_api == "trainjob" and job.kubernetes.training_runtime != default


@rule(
    "HPX178",
    "warning",
    "an unchanged script without a volume for its checkpoints",
    "In mode `run` the script saves its checkpoints itself. Files outside volumes exist only in one pod. Ranks of "
    "other pods cannot load them, and they are lost with the pod.",
    "Mount storage that all pods share, such as `{kind: claim, path: /fsx, claim: NAME}` in volumes, and save below "
    "it. If "
    "the script saves elsewhere, such as to S3: --ignore HPX178.",
    targets=KUBERNETES,
)
def unchanged_scripts_can_save(context: Context) -> Iterator[Finding]:
    job, added = context.job, context.job.overlay.kubernetes.container.get("volumeMounts")
    if context.target is None or not job.restarts_script or added or _may_be_mounted_elsewhere(job, "/"):
        return
    if all(place.wrong for place in _places(job)):
        message = "the job has no writable volume that outlives its pods, so checkpoints of the script are lost with "
        message += "the pod"
        path = "/checkpoints" if any(place.path.rstrip("/") == "/fsx" for place in _places(job)) else "/fsx"
        hint = f"add `{{kind: claim, path: {path}, claim: NAME}}` to volumes, and save below {path}"
        yield Finding(("volumes",), message, hint)


@rule(
    "HPX165",
    "error",
    "too little time to save the newest step",
    "checkpoint.grace_s is the time to save the newest step to the durable tiers, but Kubernetes kills the pod "
    "earlier.",
    "Raise kubernetes.termination_grace_s, or remove it. The default follows from checkpoint.grace_s.",
    targets=KUBERNETES,
)
def pods_have_time_to_save(context: Context) -> Iterator[Finding]:
    job, given = context.job, context.job.kubernetes.termination_grace_s
    needed = job.checkpoint.grace_s
    if given is not None and job.mode == "ours" and given < needed:
        message = f"{given} s is less than the {needed:g} s that checkpoint.grace_s needs"
        hint = f"write at least {math.ceil(needed)}, or remove it"
        yield Finding(("kubernetes", "termination_grace_s"), message, hint)


_POD_IS_THERE_S, _POD_COMES_S = 60.0, 300.0
"""Minimum of `restart.node_wait_s` for jobs with spares, and for jobs without spares, which need a new pod."""


@rule(
    "HPX167",
    "warning",
    "too little time to replace a lost pod",
    "Under AWS's operator with launcher `ours`, the other pods wait restart.node_wait_s for the replacement of a "
    "lost pod, and then the job fails. A spare takes over after the operator has noticed the loss. A new pod must "
    "be scheduled and pull its image, and its machine may have to be replaced first.",
    "Remove restart.node_wait_s, whose default is long enough, or write a larger value.",
)
def a_pod_is_waited_for(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target != "hyperpod-eks" or job.kubernetes.launcher != "ours" or job.nodes == 1:
        return
    written = job.restart.node_wait_s if "node_wait_s" in job.restart.model_fields_set else NEW_POD_S
    if written < (_POD_IS_THERE_S if job.spares_in_all else _POD_COMES_S):
        message = f"{written:g} s is too short to replace a lost pod, and the job fails after this time"
        yield Finding(("restart", "node_wait_s"), message, f"write {NEW_POD_S:g}, or remove it")


@rule(
    "HPX154",
    "error",
    "settings that a TrainJob does not have",
    "A TrainJob can change only some fields of its runtime's pods. Other settings must be in the TrainingRuntime.",
    "Set them in a TrainingRuntime of your own and name it in kubernetes.training_runtime, or use a PyTorchJob.",
)
def trainjob_has_no_field(context: Context) -> Iterator[Finding]:
    job, only = context.job, context.job.kubernetes
    if context.target != "kubeflow" or only.kubeflow_api != "trainjob":
        return
    asked: dict[Path, object] = {
        ("kubernetes", "host_network"): only.host_network,
        ("kubernetes", "pull_policy"): only.pull_policy,
        ("scheduling", "pod_priority_class"): job.scheduling.pod_priority_class,
        ("timeouts", "keep_s"): job.timeouts.keep_s,
        ("kubernetes", "container", "resources", "claims"): only.container.get("resources", {}).get("claims"),
    }
    for section, names in _OF_TRAINJOB.items():
        asked |= {("kubernetes", section, name): name not in names for name in getattr(only, section)}
    for path, given in asked.items():
        if given:
            yield Finding(path, "cannot be set in a TrainJob", "set it in the TrainingRuntime")


@rule(
    "HPX175",
    "warning",
    "a job that AWS's `hyp` cannot read",
    "sagemaker-hyperpod (3.12.0) reads all jobs of a namespace and stops at the first job with one of these fields. "
    "`hyp list` and `hyp get` then fail for all users of the namespace. The operator itself accepts these fields.",
    "Remove the field if others in the namespace use `hyp`. Use whole numbers as thresholds, `scheduling.spread` "
    "instead of pod affinities, and `volumes` of kind secret instead of secret volumes.",
)
def hyp_can_read_it(context: Context) -> Iterator[Finding]:
    if context.target != "hyperpod-eks":
        return
    hint = "remove it if others in the namespace use `hyp`"
    message = "AWS's `hyp` cannot read this field, and then fails to list any job of the namespace"
    for index, one in enumerate(context.job.log_rules):
        path = ("log_rules", index)
        if one.fault_on_match:
            yield Finding((*path, "fault_on_match"), message, hint)
        if one.threshold is not None and one.threshold != int(one.threshold):
            yield Finding((*path, "threshold"), message, "write a whole number, or remove it")
    pod = context.job.kubernetes.pod
    for field in ("podAffinity", "podAntiAffinity"):
        if field in pod.get("affinity", {}):
            yield Finding(("kubernetes", "pod", "affinity", field), message, hint)
    for index, volume in enumerate(pod.get("volumes", ())):
        if "secret" in volume:
            yield Finding(("kubernetes", "pod", "volumes", index, "secret"), message, "use a projected volume")
