"""ClusterConfig: the machines a job may run on, as their owner asks for them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config


class InstanceGroup(Config):
    """Machines of one type that are managed together."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$")]
    """Name of the group, unique in the cluster."""
    instance_type: Annotated[str, Field(pattern=r"^ml\.[a-z0-9-]+\.[a-z0-9]+$")]
    """SageMaker instance type, `ml.p5.48xlarge`."""
    count: PositiveInt
    """Machines in the group."""
    spares: NonNegativeInt = 0
    """Of these, how many stay without work until another fails."""


class ClusterConfig(Config):
    """One HyperPod cluster."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$")]
    """Name of the cluster."""
    region: Annotated[str, Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")]
    """AWS region, `us-west-2`."""
    orchestrator: Literal["eks", "slurm"] = "eks"
    """What schedules jobs on the cluster."""
    instance_groups: Annotated[tuple[InstanceGroup, ...], Field(min_length=1)]
    """Groups of machines."""
    checkpoint_bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")] | None = None
    """S3 bucket that jobs drain checkpoints to."""

    @property
    def working_nodes(self) -> int:
        """Machines that can hold a rank at once: all but the spares."""
        return sum(group.count - group.spares for group in self.instance_groups)
