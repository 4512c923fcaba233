"""Pods: volumes and times with which their state outlives them, and fields that TrainJobs or AWS's `hyp` lack."""

from __future__ import annotations

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
"""Fields of both sections that a TrainJob may change in its runtime's pods."""
_READ_ONLY = "nothing can be written there"
_GOES = "it goes with its pod"


@dataclass(frozen=True, slots=True)
class _Place:
    """A mounted folder of the container."""

    path: str
    volume: str
    """Its field in the spec."""
    wrong: str = ""
    """Reason why no checkpoint would be kept there."""
    shared: bool = False
    """All pods see the same files."""


@rule(
    "HPX128",
    "error",
    "a durable tier on what goes with its pod",
    "A tier of kind file must survive the loss of every node, a tier of kind disk the loss of every pod. A folder on "
    "no volume, or on a volume of the pod, is lost with the pod; on a read-only volume nothing can be saved.",
    "Mount storage that all nodes share, as `{kind: claim, path: /fsx, claim: fsx-claim}` in volumes, and have the "
    "tier's path below it.",
)
def durable_tiers_are_on_shared_volumes(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target not in KUBERNETES or job.mode != "ours":
        return
    for index, tier in enumerate(job.checkpoint.tiers):
        if not isinstance(tier, DurableTier) or tier.mounted is None:
            continue
        at = ("checkpoint", "tiers", index, "path")
        path = posixpath.normpath(posixpath.join(job.working_dir or "", tier.mounted))
        if not path.startswith("/"):
            message = f"`{tier.mounted}` is a folder of the container itself, and goes with it"
            yield Finding(at, message, f"write the path from the root, as /fsx/{path}, and a volume that holds it")
            continue
        if path == "/":
            yield Finding(at, "the root of the container is no volume", "write a folder below it")
            continue
        holders = [place for place in _places(job) if is_below(path, place.path)]
        nearest = max(holders, key=lambda place: len(place.path.rstrip("/")), default=None)
        if tier.on_node:
            yield from _on_the_node(nearest, path, at)
            continue
        claim = f"{{kind: claim, path: /{path.split('/')[1] or 'fsx'}, claim: NAME}}"
        if nearest is None and not _may_be_mounted_elsewhere(job, path):
            yield Finding(at, f"no volume that nodes share holds {path}", f"add `{claim}` to volumes")
        elif nearest is not None and nearest.wrong:
            message = f"{path} is on {nearest.volume}: {nearest.wrong}"
            yield Finding(at, message, "write a path on a claim that may be written to")


def _on_the_node(nearest: _Place | None, path: str, at: tuple[str | int, ...]) -> Iterator[Finding]:
    """Check a tier on each node's disk. If no volume of the spec holds it, the pod gets one."""
    if nearest is not None and (nearest.wrong or nearest.shared):
        wrong = nearest.wrong or "all nodes would write into one folder"
        hint = "write a path on no volume, or on one of kind host; `kind: file` is for storage that nodes share"
        yield Finding(at, f"{path} is on {nearest.volume}: {wrong}", hint)


def _places(job: JobConfig) -> Iterator[_Place]:
    """Yield every folder that the spec mounts."""
    for index, volume in enumerate(job.volumes):
        shared = isinstance(volume, ClaimVolume)
        yield _Place(volume.path, f"volumes.{index}, of kind {volume.kind}", _wrong_with(volume), shared)
    named = {one["name"]: one for one in job.kubernetes.pod.get("volumes", ())}
    for mount in job.kubernetes.container.get("volumeMounts", ()):
        if (found := named.get(mount["name"])) is not None:  # HPX155 reports unknown names
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
    """Whether an overlay, or a user's TrainingRuntime, may mount a volume at `path`."""
    mounts = job.overlay.kubernetes.container.get("volumeMounts")
    for one in mounts if isinstance(mounts, list) else ():
        if isinstance(one, dict) and is_below(path, str(one.get("mountPath", ""))):
            return True
    default = type(job.kubernetes).model_fields["training_runtime"].default
    return job.kubernetes.kubeflow_api == "trainjob" and job.kubernetes.training_runtime != default


@rule(
    "HPX178",
    "warning",
    "an unchanged script with nowhere to save",
    "In mode `run` the script saves its checkpoints itself. A file on no volume is in one pod: the ranks of other pods "
    "cannot load it, and it is lost with its pod.",
    "Mount storage that all pods share, as `{kind: claim, path: /fsx, claim: NAME}` in volumes, and save below it. If "
    "the script saves elsewhere, such as to S3: --ignore HPX178.",
    targets=KUBERNETES,
)
def unchanged_scripts_can_save(context: Context) -> Iterator[Finding]:
    job, added = context.job, context.job.overlay.kubernetes.container.get("volumeMounts")
    if context.target is None or not job.restarts_script or added or _may_be_mounted_elsewhere(job, "/"):
        return
    if all(place.wrong for place in _places(job)):
        message = "the job has no volume for the script's checkpoints: files in a pod are lost with the pod"
        yield Finding(
            ("volumes",), message, "add `{kind: claim, path: /fsx, claim: NAME}` to volumes, and save below /fsx"
        )


@rule(
    "HPX165",
    "error",
    "less time to end than the newest step needs",
    "checkpoint.grace_s is the time to save the newest step to the durable tiers; Kubernetes kills the pod before.",
    "Raise kubernetes.termination_grace_s, or leave it out: it then follows from checkpoint.grace_s.",
    targets=KUBERNETES,
)
def pods_have_time_to_save(context: Context) -> Iterator[Finding]:
    job, given = context.job, context.job.kubernetes.termination_grace_s
    needed = job.checkpoint.grace_s
    if given is not None and job.mode == "ours" and given < needed:
        message = f"{given} s are less than checkpoint.grace_s, {needed:g} s"
        yield Finding(("kubernetes", "termination_grace_s"), message, "leave it out")


_POD_IS_THERE_S, _POD_COMES_S = 60.0, 300.0
"""Least time until a spare replaces a lost pod, and until a new pod runs."""


@rule(
    "HPX167",
    "warning",
    "a lost pod is waited for too shortly",
    "Under AWS's operator with launcher `ours`, the others wait restart.node_wait_s for the pod in the place of a "
    "lost one, and the job has failed after that. A spare takes over when the operator has noticed the loss; a new "
    "pod must be scheduled and pull its image, and a machine may have to be replaced first.",
    "Remove restart.node_wait_s, which is then long enough, or write a larger one.",
)
def a_pod_is_waited_for(context: Context) -> Iterator[Finding]:
    job = context.job
    if context.target != "hyperpod-eks" or job.kubernetes.launcher != "ours" or job.nodes == 1:
        return
    written = job.restart.node_wait_s if "node_wait_s" in job.restart.model_fields_set else NEW_POD_S
    if written < (_POD_IS_THERE_S if job.spares_in_all else _POD_COMES_S):
        message = (
            f"{written:g} s are too short for a pod in the place of a lost one, and the job fails when they are over"
        )
        yield Finding(("restart", "node_wait_s"), message, f"write {NEW_POD_S:g}, or remove it")


@rule(
    "HPX154",
    "error",
    "a TrainJob cannot say this",
    "What a TrainJob may change of its runtime's pods is limited; these settings belong into the TrainingRuntime.",
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
            yield Finding(path, "is not among what a TrainJob may change", "set it in the TrainingRuntime")


@rule(
    "HPX175",
    "warning",
    "a job that AWS's `hyp` cannot read",
    "sagemaker-hyperpod (3.12.0) reads all jobs of a namespace and stops at the first that has one of these fields: "
    "`hyp list` and `hyp get` then fail for all users of the namespace. The operator itself takes them.",
    "Leave the field out if others in the namespace use `hyp`: whole numbers as thresholds, `scheduling.spread` in "
    "place of rules about pods, `volumes` of kind secret in place of a secret by name.",
)
def hyp_can_read_it(context: Context) -> Iterator[Finding]:
    if context.target != "hyperpod-eks":
        return
    hint = "leave it out if others in the namespace use `hyp`"
    message = "AWS's `hyp` cannot read it, and then lists no job of the namespace"
    for index, one in enumerate(context.job.log_rules):
        path = ("log_rules", index)
        if one.fault_on_match:
            yield Finding((*path, "fault_on_match"), message, hint)
        if one.threshold is not None and one.threshold != int(one.threshold):
            yield Finding((*path, "threshold"), message, "write a whole number, or leave it out")
    pod = context.job.kubernetes.pod
    for field in ("podAffinity", "podAntiAffinity"):
        if field in pod.get("affinity", {}):
            yield Finding(("kubernetes", "pod", "affinity", field), message, hint)
    for index, volume in enumerate(pod.get("volumes", ())):
        if "secret" in volume:
            yield Finding(("kubernetes", "pod", "volumes", index, "secret"), message, "write it as a projected volume")
