"""Section of a job's spec for elastic jobs, which train on a changing number of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from hyperpod_ext.config.base import Config, ContradictionError
from hyperpod_ext.config.names import AbsolutePath
from hyperpod_ext.counts import count


class ScaleConfig(Config):
    """Batch settings for one number of nodes."""

    nodes: Annotated[PositiveInt, Field(examples=[4])]
    """Number of nodes that the settings apply to."""
    global_batch_size: PositiveInt | None = None
    """Samples in one optimizer step over all ranks. Default: the job's `global_batch_size`."""
    micro_batch_size: PositiveInt | None = None
    """Samples that a rank computes at once. Default: `micro_batch_size` of the section `elastic.batch`."""
    learning_rate_factor: PositiveFloat | None = None
    """Factor by which the learning rate is multiplied. Default: computed by the rule `learning_rate` of the section
    `elastic.batch`."""


class BatchPolicy(Config):
    """How the ranks divide a step's global batch, for each number of nodes. By default, neither the global batch nor
    the loss changes with the number of nodes."""

    micro_batch_size: PositiveInt | None = None
    """Samples that a rank computes at once. If set, any number of ranks can share the micro-batches of a global batch,
    which then need not divide evenly among the ranks."""
    learning_rate: Literal["constant", "linear", "sqrt"] = "constant"
    """How the learning rate changes if `scale_config` changes the global batch. `constant`: not at all. `linear`: in
    proportion to the global batch. `sqrt`: with the square root of the global batch.
    """
    scale_config: tuple[ScaleConfig, ...] = ()
    """Settings for single numbers of nodes, which replace `micro_batch_size` and `learning_rate` while the job runs on
    that number of nodes."""

    @model_validator(mode="after")
    def _each_size_once(self) -> Self:
        sizes = [scale.nodes for scale in self.scale_config]
        if len(sizes) != len(set(sizes)):
            raise ContradictionError(
                "scale_config has two entries for the same number of nodes; keep one of them", "scale_config"
            )
        return self


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of a step on one number of nodes."""

    global_batch_size: int
    micro_batch_size: int
    learning_rate_factor: float


def batch_at(policy: BatchPolicy, nodes: int, global_batch_size: int, micro_batch_size: int | None = None) -> Batch:
    """Return the batch of a step on `nodes` nodes, for the job's `global_batch_size`. Pure.

    Raises:
        ValueError: there is no micro-batch size, or the global batch is not a multiple of the micro-batch size.
    """
    here = next((scale for scale in policy.scale_config if scale.nodes == nodes), ScaleConfig(nodes=nodes))
    batch = here.global_batch_size or global_batch_size
    micro = here.micro_batch_size or micro_batch_size or policy.micro_batch_size
    if micro is None:
        raise ValueError("micro_batch_size is missing")
    if batch % micro:
        where = f"on {count(nodes, 'node')}, " if here in policy.scale_config else ""
        raise ValueError(f"{where}global_batch_size {batch} is not a multiple of micro_batch_size {micro}")
    ratio = batch / global_batch_size
    by_rule = {"constant": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[policy.learning_rate]
    return Batch(batch, micro, here.learning_rate_factor or by_rule)


class Notices(Config):
    """Sources of notices that the platform will take a node away. After a notice, the node leaves the job, and the job
    continues with the other nodes. Notices need our agent."""

    ec2: bool | None = None
    """Whether to read notices of Spot interruptions from EC2's instance metadata. Default: yes on EC2 machines."""
    file: Annotated[AbsolutePath, Field(examples=["/run/leave"])] | None = None
    """Path of a file on the node. The existence of the file means that the platform will take the node away."""
    every_s: PositiveFloat = 5.0
    """Seconds between two checks for notices. EC2 announces a Spot interruption two minutes in advance."""


class Elastic(Config):
    """Numbers of nodes that the job can run on, and changes between them."""

    min_nodes: Annotated[PositiveInt, Field(examples=[2])]
    """Minimum number of nodes that the job runs on. With fewer nodes, the job waits."""
    max_nodes: Annotated[PositiveInt, Field(examples=[8])]
    """Maximum number of nodes that the job uses if they are free. The job starts with `nodes` nodes."""
    step: PositiveInt | None = None
    """Number of nodes by which the job grows and shrinks. Default: 1, unless `sizes` is set."""
    sizes: tuple[PositiveInt, ...] = ()
    """Instead of `step`: the only numbers of nodes that the job runs on, smallest first."""
    scaling_timeout_s: PositiveInt | None = None
    """Seconds that the job waits for requested nodes, before it continues with the nodes that it has."""
    graceful_shutdown_s: PositiveInt | None = None
    """Seconds that workers get to save their state before they are stopped because the number of nodes changes."""
    faulty_scale_down_s: PositiveInt | None = None
    """Seconds that the job waits for a replacement of a faulty node, before it continues without the faulty node."""
    batch: BatchPolicy = BatchPolicy()
    """How the ranks divide a step's global batch, for each number of nodes."""
    notices: Notices = Notices()
    """Sources of notices that the platform will take a node away."""

    @model_serializer(mode="wrap")
    def _without_what_is_understood(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        if self.notices == Notices():
            del dumped["notices"]  # left out, because older container images do not know the field `notices`
        return dumped

    @model_validator(mode="after")
    def _one_way_to_step(self) -> Self:
        if self.step is not None and self.sizes:
            raise ContradictionError("step and sizes both set the allowed numbers of nodes; keep one of them", "step")
        return self
