"""Volumes of a pod and where its container sees them: the spec's own, /dev/shm, and the job's secret. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.volumes import ClaimVolume, ConfigVolume, HostVolume, ScratchVolume, SecretVolume, Volume

_OWNER_ONLY = 0o400
"""The runtime refuses a secret that others can read."""


@dataclass(frozen=True, slots=True)
class Mounts:
    """Both halves that Kubernetes wants of each."""

    volumes: list[dict[str, Any]] = field(default_factory=list)
    mounts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, source: dict[str, Any], path: str, **more: Any) -> None:
        """One volume and its mount."""
        self.volumes.append({"name": name} | source)
        self.mounts.append({"name": name, "mountPath": path} | {key: value for key, value in more.items() if value})


def job_mounts(job: JobConfig) -> Mounts:
    """All volumes of the job's pods."""
    mounts = Mounts()
    for index, volume in enumerate(job.volumes):
        more: dict[str, Any] = {}
        if isinstance(volume, ClaimVolume | HostVolume):
            more["readOnly"] = volume.read_only
        if isinstance(volume, ClaimVolume):
            more["subPath"] = volume.sub_path
        mounts.add(f"{volume.kind}-{index}", source_of(volume), volume.path, **more)
    if not any(volume.path.rstrip("/") == "/dev/shm" for volume in job.volumes):
        limit = {"sizeLimit": f"{job.shared_memory_mib}Mi"} if job.shared_memory_mib else {}
        mounts.add("shm", {"emptyDir": {"medium": "Memory"} | limit}, "/dev/shm")
    if job.mode == "ours":
        items = [{"key": "secret", "path": "secret"}]
        secret = {"secretName": secret_name(job), "defaultMode": _OWNER_ONLY, "items": items}
        mounts.add(labels.SECRET_VOLUME, {"secret": secret}, labels.SECRET_DIR, readOnly=True)
    return mounts


def secret_name(job: JobConfig) -> str:
    """The Secret that members of the job know each other by."""
    return job.kubernetes.job_secret or f"{job.name}-hpx"


def source_of(volume: Volume) -> dict[str, Any]:
    """What Kubernetes mounts."""
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
