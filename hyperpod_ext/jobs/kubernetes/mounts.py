"""Renders volumes of a pod and their mounts, for the spec's `volumes`, /dev/shm, tiers on disks, and the secret. Pure.

The volumes in `kubernetes.pod.volumes` are added by module `pod`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.volumes import (
    ClaimVolume,
    ConfigVolume,
    HostVolume,
    ScratchVolume,
    SecretVolume,
    Volume,
    is_below,
)

_OWNER_ONLY = 0o400
"""File mode of secret files. The runtime refuses a secret file that other users can read."""
_SHARED_MEMORY = "shm"
_NUMBERED = re.compile(rf"(claim|host|scratch|config|secret|{labels.DISK_VOLUME})-[0-9]+")


@dataclass(frozen=True, slots=True)
class Mounts:
    """Volumes of a pod, and their mounts in the training container."""

    volumes: list[dict[str, Any]] = field(default_factory=list)
    mounts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, source: dict[str, Any], path: str, **more: Any) -> None:
        """Add a volume and its mount.

        Args:
            name: name of the volume.
            source: source of the volume, such as an emptyDir.
            path: path of the mount in the container.
            more: additional fields of the mount; None or an empty value leaves a field out.
        """
        self.volumes.append({"name": name} | source)
        self.mounts.append({"name": name, "mountPath": path} | {key: value for key, value in more.items() if value})


def job_mounts(job: JobConfig, *, keeps_addresses: bool = False, projected: bool = False) -> Mounts:
    """Return the volumes of the job's pods and their mounts, except volumes in `kubernetes.pod.volumes`.

    Args:
        keeps_addresses: add a volume for the file in which hyperpodrun stores addresses. Without the volume,
            hyperpodrun must run as root to write the file.
        projected: mount secrets as projected volumes, with the same files and file modes, because AWS's `hyp` cannot
            read pods with secret volumes.
    """
    mounts = Mounts()
    for index, volume in enumerate(job.volumes):
        more: dict[str, Any] = {}
        if isinstance(volume, ClaimVolume | HostVolume):
            more["readOnly"] = volume.read_only
        if isinstance(volume, ClaimVolume):
            more["subPath"] = volume.sub_path
        mounts.add(f"{volume.kind}-{index}", _as(source_of(volume), projected), volume.path, **more)
    if _needs_shared_memory(job):
        limit = {"sizeLimit": f"{job.shared_memory_mib}Mi"} if job.shared_memory_mib else {}
        mounts.add(_SHARED_MEMORY, {"emptyDir": {"medium": "Memory"} | limit}, "/dev/shm")
    for number, path in enumerate(_disks(job)):
        mounts.add(f"{labels.DISK_VOLUME}-{number}", {"hostPath": {"path": path, "type": "DirectoryOrCreate"}}, path)
    if keeps_addresses and not any(is_below(labels.ADDRESSES_DIR, path) for path in _mounted(job)):
        mounts.add(labels.ADDRESSES_VOLUME, {"emptyDir": {}}, labels.ADDRESSES_DIR)
    if job.has_agent:
        items = [{"key": "secret", "path": "secret"}]
        secret = {"secretName": secret_name(job), "defaultMode": _OWNER_ONLY, "items": items}
        mounts.add(labels.SECRET_VOLUME, _as({"secret": secret}, projected), labels.SECRET_DIR, readOnly=True)
    return mounts


def _as(source: dict[str, Any], projected: bool) -> dict[str, Any]:
    """Return the source of a volume. With `projected`, a secret volume is converted to a projected volume."""
    if not projected or "secret" not in source:
        return source
    secret = dict(source["secret"])
    mode, name = secret.pop("defaultMode"), secret.pop("secretName")
    return {"projected": {"defaultMode": mode, "sources": [{"secret": {"name": name} | secret}]}}


def is_own_name(job: JobConfig, name: str) -> bool:
    """Return whether `name` is a name that hp-ext gives to volumes of the job, or would give if its tiers changed."""
    return name in _own_names(job) or name.startswith(labels.DISK_VOLUME)


def _own_names(job: JobConfig) -> set[str]:
    found = {f"{volume.kind}-{index}" for index, volume in enumerate(job.volumes)}
    found |= {labels.ADDRESSES_VOLUME, *([_SHARED_MEMORY] if _needs_shared_memory(job) else [])}
    return found | ({labels.SECRET_VOLUME} if job.has_agent else set())


def _disks(job: JobConfig) -> list[str]:
    """Return the folders of tiers of kind disk that need a volume, because no volume of the spec contains them."""
    if job.mode != "ours":
        return []
    wanted = [tier.mounted for tier in job.checkpoint.durable() if tier.on_node]
    return [path for path in wanted if path and not any(is_below(path, place) for place in _mounted(job))]


def _mounted(job: JobConfig) -> list[str]:
    by_name = [one["mountPath"] for one in job.kubernetes.container.get("volumeMounts", ())]
    return [*by_name, *(volume.path for volume in job.volumes)]


def _needs_shared_memory(job: JobConfig) -> bool:
    return not any(path.rstrip("/") == "/dev/shm" for path in _mounted(job))


def is_ours(name: str) -> bool:
    """Return whether `name` is a name that `job_mounts` gives to volumes in rendered files."""
    return (
        name in (_SHARED_MEMORY, labels.ADDRESSES_VOLUME, labels.SECRET_VOLUME) or _NUMBERED.fullmatch(name) is not None
    )


def secret_name(job: JobConfig) -> str:
    """Return the name of the Secret with which the job's nodes authenticate each other."""
    return job.kubernetes.job_secret or f"{job.name}-hpx"


def source_of(volume: Volume) -> dict[str, Any]:
    """Return a volume of the spec as the source of a Kubernetes volume."""
    match volume:
        case ClaimVolume():
            read_only = {"readOnly": True} if volume.read_only else {}
            return {"persistentVolumeClaim": {"claimName": volume.claim} | read_only}
        case HostVolume():
            return {"hostPath": {"path": volume.host_path}}
        case ScratchVolume():
            medium = {"medium": "Memory"} if volume.in_memory else {}
            limit = {"sizeLimit": f"{volume.size_mib}Mi"} if volume.size_mib else {}
            return {"emptyDir": medium | limit}
        case ConfigVolume():
            return {"configMap": {"name": volume.config_map}}
        case SecretVolume():
            return {"secret": {"secretName": volume.secret, "defaultMode": _OWNER_ONLY}}
