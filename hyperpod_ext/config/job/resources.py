"""Section of a job's spec for the resources of each node: its instance type, and the job's share of the node."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.names import InstanceType, LabelKey


class Resources(Config):
    """Resources of one node. The defaults depend on the instance type; `hp-ext instances` lists instance types and
    their resources."""

    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])] | None = None
    """SageMaker instance type of every node, such as `ml.p5.48xlarge`."""
    accelerators: NonNegativeInt | None = None
    """Number of GPUs or Trainium chips that the job uses on each node. Default: on Trainium all chips; on GPU instance
    types one GPU per worker."""
    accelerator_resource: Annotated[LabelKey, Field(examples=["nvidia.com/mig-1g.10gb"])] | None = None
    """Kubernetes resource name of the accelerators, for example of a MIG slice. Default: `nvidia.com/gpu`, or on
    Trainium `aws.amazon.com/neurondevice`."""
    efa: NonNegativeInt | None = None
    """Number of EFA interfaces that the job uses on each node. Default: all interfaces if the job has several nodes and
    uses all accelerators of a node; otherwise none."""
    cpus: Annotated[PositiveFloat, Field(allow_inf_nan=False)] | None = None
    """Number of CPUs that the job uses on each node. Default: the same share of the node's CPUs as of its accelerators,
    after subtracting the CPUs that Kubernetes reserves for itself."""
    memory_mib: PositiveInt | None = None
    """Memory in MiB that the job uses on each node. Default: the same share of the node's memory as of its
    accelerators."""
    hugepages_mib: Annotated[PositiveInt, Field(multiple_of=2)] | None = None
    """Memory in MiB that each node reserves for EFA in huge pages of 2 MiB. Default: 5120 on Kubernetes with EFA."""
    ephemeral_storage_mib: PositiveInt | None = None
    """Space in MiB that the job uses on the node's own disk."""


class Libraries(Config):
    """Versions of EFA libraries in the image, which determine the environment variables that the job needs for EFA.
    Default: the versions in AWS's images of 2024."""

    ofi_nccl: Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)*$", examples=["1.16.0"])] | None = None
    """Version of aws-ofi-nccl, NCCL's plugin for EFA. Versions before 1.7 need environment variables that slow newer
    versions down."""
    libfabric: Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)*$", examples=["1.22.0"])] | None = None
    """Version of libfabric from the EFA installer. Versions before 1.18 need an environment variable to use EFA."""
