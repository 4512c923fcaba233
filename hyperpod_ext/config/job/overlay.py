"""Section of a job's spec for settings that have no field in the spec, in the target's own format. The overlay is
applied last, to the rendered files."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.job.slurm import SbatchOption, ShellLine

Patch = Annotated[dict[str, JsonValue], Field(examples=[{"shareProcessNamespace": True}])]


class KubernetesOverlay(Config):
    """Strategic merge patches of Kubernetes objects, as for `kubectl patch`. Mappings are merged, and null removes a
    field. Lists of containers, volumes, variables and ports are merged by their names or numbers; other lists are
    replaced."""

    container: Patch = {}
    """Patch of the training container, with fields of Kubernetes' type Container such as `lifecycle`, `livenessProbe`
    or `envFrom`."""
    pod: Patch = {}
    """Patch of every pod, with fields of Kubernetes' type PodSpec such as `initContainers`, `hostAliases` or
    `runtimeClassName`."""
    job: Patch = {}
    """Patch of the Kubernetes object of the job, with fields such as `spec.runPolicy`."""


class SlurmOverlay(Config):
    """Additional lines and options of the sbatch file. Slurm itself refuses unknown options."""

    sbatch: tuple[
        Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*(=[^\n\r\x00]*)?$", examples=["licenses=fem:4"])],
        ...,
    ] = ()
    """Options for additional `#SBATCH` lines, without the leading dashes, such as `licenses=fem:4` or
    `comment="two words"`. Each option is written unchanged."""
    srun: dict[SbatchOption, Annotated[str, Field(pattern=r"^[^\n\r\x00]*$")]] = {}
    """Additional options of srun, such as `mpi: pmix`. An empty value stands for an option without a value."""
    before: tuple[ShellLine, ...] = ()
    """Shell lines that the first node runs, outside the image, before the Slurm step starts. If one of the shell lines
    fails, the job ends."""


class SageMakerOverlay(Config):
    """Additional members of the CreateTrainingJob request to SageMaker."""

    request: Annotated[dict[str, JsonValue], Field(examples=[{"DebugHookConfig": {"S3OutputPath": "s3://b/p"}}])] = {}
    """Members to add to the CreateTrainingJob request. Mappings are merged, and items of lists are appended."""


class Overlay(Config):
    """Settings that have no field in the spec, with a section for each kind of target. An overlay is applied to the
    rendered files last. The overlay is checked against the target's types, and refused if it would break the job."""

    kubernetes: KubernetesOverlay = KubernetesOverlay()
    """Overlay for the targets hyperpod-eks and kubeflow."""
    slurm: SlurmOverlay = SlurmOverlay()
    """Overlay for the target hyperpod-slurm."""
    sagemaker: SageMakerOverlay = SageMakerOverlay()
    """Overlay for the target sagemaker."""
