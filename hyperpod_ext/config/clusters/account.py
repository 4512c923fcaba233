"""What is there in the account that a cluster is made in: stated for checks alone, never sent."""

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
    """Zone that it is in, by id."""
    free_addresses: NonNegativeInt | None = None
    """Addresses that are free in it."""


class PlanFacts(Config):
    """A training plan."""

    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])]
    """Type of its machines."""
    zone: Zone | None = None
    """Zone that they are in, by id."""
    count: PositiveInt | None = None
    """So many of them."""


class QuotaFacts(Config):
    """A quota of SageMaker: machines of one type in all clusters of the account."""

    machines: Annotated[NonNegativeInt, Field(examples=[16])]
    """So many."""
    code: QuotaCode | None = None
    """Its code, by which more is asked for."""


class AccountFacts(Config):
    """What is there in the account. What is not stated is not checked."""

    subnets: dict[NetworkId, SubnetFacts] = {}
    """Subnets by their ids."""
    training_plans: dict[TrainingPlan, PlanFacts] = {}
    """Training plans by their ARNs."""
    file_systems: dict[FileSystemId, Zone] = {}
    """Zone of each file system of FSx, by its id."""
    quotas: dict[InstanceType, QuotaFacts] = {}
    """Quotas of machines in clusters, by type."""
    eks_version: Annotated[str, Field(pattern=r"^1\.\d{2}$", examples=["1.34"])] | None = None
    """Kubernetes of the EKS cluster that is there."""
    lifecycle_files: tuple[Annotated[str, Field(pattern=r"^s3://.+$")], ...] | None = None
    """All files in the folders of lifecycle scripts."""
