"""Volumes of a job's containers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.names import AbsolutePath, ObjectName, stays_below

_Path = Annotated[AbsolutePath, Field(examples=["/data"])]


class ClaimVolume(Config):
    """A volume from a Kubernetes PersistentVolumeClaim, for example a file system of FSx for Lustre."""

    kind: Literal["claim"] = "claim"
    path: _Path
    """Mount path in the container."""
    claim: Annotated[ObjectName, Field(examples=["fsx-claim"])]
    """Name of the PersistentVolumeClaim, in the job's namespace."""
    sub_path: Annotated[str, Field(pattern=r"^[^/\x00][^\x00]*$"), AfterValidator(stays_below)] | None = None
    """Folder of the volume to mount. Default: the whole volume."""
    read_only: bool = False
    """Whether the volume is read-only."""


class HostVolume(Config):
    """A folder of the node's file system, for example the shared file system `/fsx` on HyperPod Slurm."""

    kind: Literal["host"] = "host"
    path: _Path
    """Mount path in the container."""
    host_path: Annotated[AbsolutePath, Field(examples=["/fsx"])]
    """Folder on the node."""
    read_only: bool = False
    """Whether the volume is read-only."""


class ScratchVolume(Config):
    """A temporary volume, which is empty when a pod starts and is removed together with the pod."""

    kind: Literal["scratch"] = "scratch"
    path: _Path
    """Mount path in the container."""
    size_mib: PositiveInt | None = None
    """Maximum size of the volume in MiB. None: no limit."""
    in_memory: bool = False
    """Whether the volume is in memory instead of on the node's disk. Files in memory count as memory of the pod."""


class ConfigVolume(Config):
    """A volume whose files are the entries of a Kubernetes ConfigMap."""

    kind: Literal["config"] = "config"
    path: _Path
    """Mount path in the container."""
    config_map: Annotated[ObjectName, Field(examples=["settings"])]
    """Name of the ConfigMap, in the job's namespace."""


class SecretVolume(Config):
    """A volume whose files are the entries of a Kubernetes Secret. Only the owner of the files can read them."""

    kind: Literal["secret"] = "secret"
    path: _Path
    """Mount path in the container."""
    secret: Annotated[ObjectName, Field(examples=["hub-token"])]
    """Name of the Secret, in the job's namespace."""


Volume = Annotated[ClaimVolume | HostVolume | ScratchVolume | ConfigVolume | SecretVolume, Field(discriminator="kind")]


def is_below(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` itself or is inside it."""
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")
