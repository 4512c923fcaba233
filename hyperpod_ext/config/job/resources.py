"""Resources of each node: its instance type, and the job's share of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.names import InstanceType, LabelKey


class Resources(Config):
    """Resources of one node. Defaults follow from the instance type; `hp-ext instances` shows them."""

    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])] | None = None
    """SageMaker instance type of every node, `ml.p5.48xlarge`."""
    accelerators: NonNegativeInt | None = None
    """GPUs or Trainium chips of each node for the job. Default: one per worker, if the instance type has accelerators;
    on Trainium all chips."""
    accelerator_resource: Annotated[LabelKey, Field(examples=["nvidia.com/mig-1g.10gb"])] | None = None
    """Kubernetes' resource name, for example of a MIG slice. Default: `nvidia.com/gpu`, or
    `aws.amazon.com/neurondevice`."""
    efa: NonNegativeInt | None = None
    """EFA interfaces of each node for the job. Default: all interfaces if the job has several nodes and uses all
    accelerators of a node; otherwise none."""
    cpus: Annotated[PositiveFloat, Field(allow_inf_nan=False)] | None = None
    """CPUs of each node for the job. Default: the same share as of the accelerators, without Kubernetes' own
    reservation."""
    memory_mib: PositiveInt | None = None
    """Memory of each node for the job, in MiB. Default: the same share as for `cpus`."""
    hugepages_mib: Annotated[PositiveInt, Field(multiple_of=2)] | None = None
    """Memory in pages of 2 MiB for EFA, in MiB. Default: 5120 on Kubernetes with EFA."""
    ephemeral_storage_mib: PositiveInt | None = None
    """Space on the node's own disk, in MiB."""


class Libraries(Config):
    """Versions of libraries in the image that determine EFA's variables. Default: the versions in AWS's images of
    2024."""

    ofi_nccl: Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)*$", examples=["1.16.0"])] | None = None
    """aws-ofi-nccl, NCCL's plugin for EFA. Before 1.6 and 1.7 it needed variables that slow newer versions."""
    libfabric: Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)*$", examples=["1.22.0"])] | None = None
    """libfabric, of the EFA installer. Before 1.18 it needed a variable to use EFA."""
