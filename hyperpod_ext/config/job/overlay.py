"""Settings without a field in the spec, in the target's own format. An overlay is applied last, to the rendered
files."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.job.slurm import SbatchOption, ShellLine

Patch = Annotated[dict[str, JsonValue], Field(examples=[{"shareProcessNamespace": True}])]


class KubernetesOverlay(Config):
    """Strategic merge patches, as for `kubectl patch`: mappings are merged, null removes a field, lists of containers,
    volumes, variables and ports are merged by their names or numbers, other lists are replaced."""

    container: Patch = {}
    """Patch of the training container, a Container: `lifecycle`, `livenessProbe`, `envFrom`."""
    pod: Patch = {}
    """Patch of every pod, a PodSpec: `initContainers`, `hostAliases`, `runtimeClassName`."""
    job: Patch = {}
    """Patch of the job's object: `spec.runPolicy`, and other fields of its operator."""


class SlurmOverlay(Config):
    """Lines and options of the sbatch file. Slurm itself refuses unknown ones."""

    sbatch: tuple[
        Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*(=[^\n\r\x00]*)?$", examples=["licenses=fem:4"])],
        ...,
    ] = ()
    """Additional `#SBATCH` lines without their dashes, unchanged: `licenses=fem:4`, `comment="two words"`."""
    srun: dict[SbatchOption, Annotated[str, Field(pattern=r"^[^\n\r\x00]*$")]] = {}
    """Additional options of srun, `mpi: pmix`. An empty value stands for an option without a value."""
    before: tuple[ShellLine, ...] = ()
    """Shell lines that the first node runs outside the image before the Slurm step starts. A failed line ends the
    job."""


class SageMakerOverlay(Config):
    """Additional members of the CreateTrainingJob request."""

    request: Annotated[dict[str, JsonValue], Field(examples=[{"DebugHookConfig": {"S3OutputPath": "s3://b/p"}}])] = {}
    """Members to add to the request: mappings are merged, items of lists are appended."""


class Overlay(Config):
    """Settings without a field in the spec, a section for each kind of target. An overlay is applied last, checked
    against the target's types, and refused if it would break the job."""

    kubernetes: KubernetesOverlay = KubernetesOverlay()
    """For targets hyperpod-eks and kubeflow."""
    slurm: SlurmOverlay = SlurmOverlay()
    """For target hyperpod-slurm."""
    sagemaker: SageMakerOverlay = SageMakerOverlay()
    """For target sagemaker."""
