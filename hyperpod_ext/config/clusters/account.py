"""Facts about the AWS account of a cluster. Only checks of the cluster's spec read the facts about the account; no
request to AWS contains them."""

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
    """Facts about an existing subnet."""

    zone: Zone
    """Availability zone of the subnet, by its id, such as `usw2-az1`."""
    free_addresses: NonNegativeInt | None = None
    """Number of free IP addresses in the subnet. None: unknown."""


class PlanFacts(Config):
    """Facts about an existing training plan."""

    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])]
    """Instance type of the plan's machines."""
    zone: Zone | None = None
    """Availability zone of the plan's machines, by its id, such as `usw2-az1`. None: unknown."""
    count: PositiveInt | None = None
    """Number of machines in the plan. None: unknown."""


class QuotaFacts(Config):
    """A quota of SageMaker: the maximum number of machines of one instance type in all clusters of the account."""

    machines: Annotated[NonNegativeInt, Field(examples=[16])]
    """Maximum number of machines."""
    code: QuotaCode | None = None
    """Code of the quota in Service Quotas, for a request to increase the quota."""


class AccountFacts(Config):
    """Existing resources and quotas of the AWS account. Checks that need an unset field are skipped."""

    subnets: dict[NetworkId, SubnetFacts] = {}
    """Subnets by their ids."""
    training_plans: dict[TrainingPlan, PlanFacts] = {}
    """Training plans by their ARNs."""
    file_systems: dict[FileSystemId, Zone] = {}
    """Availability zone of each FSx file system, by the id of the file system."""
    quotas: dict[InstanceType, QuotaFacts] = {}
    """Quotas for machines in HyperPod clusters, by instance type."""
    eks_version: Annotated[str, Field(pattern=r"^1\.\d{2}$", examples=["1.34"])] | None = None
    """Kubernetes version of the existing EKS cluster."""
    lifecycle_files: tuple[Annotated[str, Field(pattern=r"^s3://.+$")], ...] | None = None
    """S3 URIs of all files in the folders of lifecycle scripts."""
