"""What one node of a job must have: its instance type, and the share of it that the job takes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.names import InstanceType, LabelKey


class Resources(Config):
    """One node. What is not said follows from the instance type; `hp-ext instances` shows it."""

    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])] | None = None
    """SageMaker instance type of every node, `ml.p5.48xlarge`."""
    accelerators: NonNegativeInt | None = None
    """GPUs or Trainium chips of each node that the job takes. Default: one a worker, if the instance type
    has any; on Trainium all of them."""
    accelerator_resource: Annotated[LabelKey, Field(examples=["nvidia.com/mig-1g.10gb"])] | None = None
    """What Kubernetes calls them. Default: `nvidia.com/gpu`, or `aws.amazon.com/neurondevice`; a MIG slice is
    named here."""
    efa: NonNegativeInt | None = None
    """EFA interfaces of each node that the job takes. Default: all that the instance type has if the job takes
    all of its accelerators and has several nodes; else none."""
    cpus: Annotated[PositiveFloat, Field(allow_inf_nan=False)] | None = None
    """CPUs of each node that the job asks for. Default: a share as large as that of the accelerators, less
    what Kubernetes keeps for itself."""
    memory_mib: PositiveInt | None = None
    """Memory of each node that the job asks for, in MiB. Default: as for cpus."""
    hugepages_mib: Annotated[PositiveInt, Field(multiple_of=2)] | None = None
    """Memory in pages of 2 MiB, in MiB, which EFA uses. Default: 5120 on Kubernetes with EFA."""
    ephemeral_storage_mib: PositiveInt | None = None
    """Space on the node's own disk, in MiB."""


class Libraries(Config):
    """Versions in the image that decide which variables EFA needs. Default: as new as AWS's images of 2024."""

    ofi_nccl: Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)*$", examples=["1.16.0"])] | None = None
    """aws-ofi-nccl, NCCL's way to EFA. Before 1.6 and 1.7 it needed variables that hurt newer ones."""
    libfabric: Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)*$", examples=["1.22.0"])] | None = None
    """libfabric, of the EFA installer. Before 1.18 it needed a variable to use EFA at all."""
