"""Facts about the account of a cluster. Only checks read them; they are never sent to AWS."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.clusters.cluster_parts import TrainingPlan
from hyperpod_ext.config.clusters.infrastructure import Zone
from hyperpod_ext.config.job.sagemaker import NetworkId
from hyperpod_ext.config.names import InstanceType

FileSystemId = Annotated[str, Field(pattern=r"^(fs|fc)i?-[0-9a-f]{8,}$")]
QuotaCode = Annotated[str, Field(pattern=r"^L-[0-9A-F]{8}$", examples=["L-0123ABCD"])]


class SubnetFacts(Config):
    """A subnet."""

    zone: Zone
    """Zone of the subnet, by id."""
    free_addresses: NonNegativeInt | None = None
    """Free addresses in the subnet."""


class PlanFacts(Config):
    """A training plan."""

    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])]
    """Type of its machines."""
    zone: Zone | None = None
    """Zone of its machines, by id."""
    count: PositiveInt | None = None
    """Number of its machines."""


class QuotaFacts(Config):
    """A quota of SageMaker: machines of one type in all clusters of the account."""

    machines: Annotated[NonNegativeInt, Field(examples=[16])]
    """Number of machines."""
    code: QuotaCode | None = None
    """Code of the quota, for requests to increase it."""


class AccountFacts(Config):
    """Existing resources and quotas of the account. Unset fields are not checked."""

    subnets: dict[NetworkId, SubnetFacts] = {}
    """Subnets by their ids."""
    training_plans: dict[TrainingPlan, PlanFacts] = {}
    """Training plans by their ARNs."""
    file_systems: dict[FileSystemId, Zone] = {}
    """Zone of each file system of FSx, by its id."""
    quotas: dict[InstanceType, QuotaFacts] = {}
    """Quotas of machines in clusters, by type."""
    eks_version: Annotated[str, Field(pattern=r"^1\.\d{2}$", examples=["1.34"])] | None = None
    """Version of Kubernetes of the existing EKS cluster."""
    lifecycle_files: tuple[Annotated[str, Field(pattern=r"^s3://.+$")], ...] | None = None
    """All files in the folders of lifecycle scripts."""
