"""Volumes of a job's containers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.names import AbsolutePath, ObjectName, stays_below

_Path = Annotated[AbsolutePath, Field(examples=["/data"])]


class ClaimVolume(Config):
    """A PersistentVolumeClaim: FSx for Lustre, for example."""

    kind: Literal["claim"] = "claim"
    path: _Path
    """Mount path in the container."""
    claim: Annotated[ObjectName, Field(examples=["fsx-claim"])]
    """Name of the claim, in the job's namespace."""
    sub_path: Annotated[str, Field(pattern=r"^[^/\x00][^\x00]*$"), AfterValidator(stays_below)] | None = None
    """Folder of the volume to mount. Default: the whole volume."""
    read_only: bool = False
    """Whether the volume is read-only."""


class HostVolume(Config):
    """A folder of the node, or of a file system on every node: `/fsx` on HyperPod Slurm."""

    kind: Literal["host"] = "host"
    path: _Path
    """Mount path in the container."""
    host_path: Annotated[AbsolutePath, Field(examples=["/fsx"])]
    """Folder on the node."""
    read_only: bool = False
    """Whether the volume is read-only."""


class ScratchVolume(Config):
    """Space that is empty at the start of each pod and is removed with it."""

    kind: Literal["scratch"] = "scratch"
    path: _Path
    """Mount path in the container."""
    size_mib: PositiveInt | None = None
    """Largest size, in MiB."""
    in_memory: bool = False
    """Use memory instead of the node's disk. The space counts as memory of the pod."""


class ConfigVolume(Config):
    """A ConfigMap of Kubernetes, as files."""

    kind: Literal["config"] = "config"
    path: _Path
    """Mount path in the container."""
    config_map: Annotated[ObjectName, Field(examples=["settings"])]
    """Name of the ConfigMap, in the job's namespace."""


class SecretVolume(Config):
    """A Secret of Kubernetes, as files that only their owner can read."""

    kind: Literal["secret"] = "secret"
    path: _Path
    """Mount path in the container."""
    secret: Annotated[ObjectName, Field(examples=["hub-token"])]
    """Name of the Secret, in the job's namespace."""


Volume = Annotated[ClaimVolume | HostVolume | ScratchVolume | ConfigVolume | SecretVolume, Field(discriminator="kind")]


def is_below(path: str, folder: str) -> bool:
    """Return whether `path` is this folder or in it."""
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")
