"""ClusterConfig: the machines a job may run on, as their owner asks for them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$")]


class InstanceGroup(Config):
    """Machines of one type that are managed together."""

    name: Annotated[Name, Field(examples=["workers"])]
    """Name of the group, unique in the cluster: letters, digits and inner dashes, at most 63 characters."""
    instance_type: Annotated[str, Field(pattern=r"^ml\.[a-z0-9-]+\.[a-z0-9]+$", examples=["ml.p5.48xlarge"])]
    """SageMaker instance type, `ml.p5.48xlarge`."""
    count: Annotated[PositiveInt, Field(examples=[2])]
    """Machines in the group."""
    spares: NonNegativeInt = 0
    """Of these, how many stay without work until another fails."""


class ClusterConfig(Config):
    """One HyperPod cluster."""

    name: Annotated[Name, Field(examples=["research"])]
    """Name of the cluster: letters, digits and inner dashes, at most 63 characters."""
    region: Annotated[str, Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$", examples=["us-west-2"])]
    """AWS region, `us-west-2`."""
    orchestrator: Literal["eks", "slurm"] = "eks"
    """What schedules jobs on the cluster."""
    instance_groups: Annotated[
        tuple[InstanceGroup, ...],
        Field(min_length=1, examples=[[{"name": "workers", "instance_type": "ml.p5.48xlarge", "count": 2}]]),
    ]
    """Groups of machines."""
    checkpoint_bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")] | None = None
    """S3 bucket that jobs drain checkpoints to."""

    @property
    def working_nodes(self) -> int:
        """Machines that can hold a rank at once: all but the spares."""
        return sum(group.count - group.spares for group in self.instance_groups)
