"""Files and memory that containers of a job see, besides their image."""

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
    """Where the container sees it."""
    claim: Annotated[ObjectName, Field(examples=["fsx-claim"])]
    """Name of the claim, in the job's namespace."""
    sub_path: Annotated[str, Field(pattern=r"^[^/\x00][^\x00]*$"), AfterValidator(stays_below)] | None = None
    """Only this folder of it."""
    read_only: bool = False
    """Nothing may be written."""


class HostVolume(Config):
    """A folder of the node itself, or one that every node mounts: `/fsx` on HyperPod Slurm."""

    kind: Literal["host"] = "host"
    path: _Path
    """Where the container sees it."""
    host_path: Annotated[AbsolutePath, Field(examples=["/fsx"])]
    """The folder on the node."""
    read_only: bool = False
    """Nothing may be written."""


class ScratchVolume(Config):
    """Space that is empty at the start of each pod and goes with it."""

    kind: Literal["scratch"] = "scratch"
    path: _Path
    """Where the container sees it."""
    size_mib: PositiveInt | None = None
    """Most it may hold, in MiB."""
    in_memory: bool = False
    """In memory rather than on the node's disk; counts as memory of the pod."""


class ConfigVolume(Config):
    """A ConfigMap of Kubernetes, as files."""

    kind: Literal["config"] = "config"
    path: _Path
    """Where the container sees it."""
    config_map: Annotated[ObjectName, Field(examples=["settings"])]
    """Name of the ConfigMap, in the job's namespace."""


class SecretVolume(Config):
    """A Secret of Kubernetes, as files that only their owner may read."""

    kind: Literal["secret"] = "secret"
    path: _Path
    """Where the container sees it."""
    secret: Annotated[ObjectName, Field(examples=["hub-token"])]
    """Name of the Secret, in the job's namespace."""


Volume = Annotated[ClaimVolume | HostVolume | ScratchVolume | ConfigVolume | SecretVolume, Field(discriminator="kind")]


def is_below(path: str, folder: str) -> bool:
    """Whether `path` is this folder or in it."""
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")
