"""What a spec has no field for, in the target's own words: applied last, to the rendered files."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.job.slurm import SbatchOption, ShellLine

Patch = Annotated[dict[str, JsonValue], Field(examples=[{"shareProcessNamespace": True}])]


class KubernetesOverlay(Config):
    """Strategic merge patches, as `kubectl patch` takes them: mappings are merged, null removes a field, lists of
    containers, volumes, variables and ports are merged by their names or numbers, other lists are replaced."""

    container: Patch = {}
    """Patch of the container that trains, a Container: `lifecycle`, `livenessProbe`, `envFrom`."""
    pod: Patch = {}
    """Patch of every pod, a PodSpec: `initContainers`, `hostAliases`, `runtimeClassName`."""
    job: Patch = {}
    """Patch of the job's object: `spec.runPolicy`, and whatever its operator knows."""


class SlurmOverlay(Config):
    """Lines and options of the sbatch file. Slurm itself refuses those that it does not know."""

    sbatch: tuple[
        Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*(=[^\n\r\x00]*)?$", examples=["licenses=fem:4"])],
        ...,
    ] = ()
    """Further `#SBATCH` lines without their dashes, as they are: `licenses=fem:4`, `comment="two words"`."""
    srun: dict[SbatchOption, Annotated[str, Field(pattern=r"^[^\n\r\x00]*$")]] = {}
    """Further options of the step, `mpi: pmix`. An empty value: the option alone."""
    before: tuple[ShellLine, ...] = ()
    """Lines of shell that the first node runs before the step, outside of the image; one that fails ends the job."""


class SageMakerOverlay(Config):
    """Members of the CreateTrainingJob request that the rendered one lacks."""

    request: Annotated[dict[str, JsonValue], Field(examples=[{"DebugHookConfig": {"S3OutputPath": "s3://b/p"}}])] = {}
    """Added to the request: mappings are merged, items of lists are added at the end."""


class Overlay(Config):
    """What a spec has no field for, a section for each kind of target. It is applied last, checked against what the
    target takes, and refused where it would break what the job relies on."""

    kubernetes: KubernetesOverlay = KubernetesOverlay()
    """For targets hyperpod-eks and kubeflow."""
    slurm: SlurmOverlay = SlurmOverlay()
    """For target hyperpod-slurm."""
    sagemaker: SageMakerOverlay = SageMakerOverlay()
    """For target sagemaker."""
