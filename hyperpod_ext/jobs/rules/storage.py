"""Volumes of durable tiers in pods: they must outlive the pod."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.config.checkpoint import DurableTier
from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.volumes import ClaimVolume, HostVolume, ScratchVolume, Volume, is_below
from hyperpod_ext.jobs.rules import KUBERNETES, Context, rule

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
