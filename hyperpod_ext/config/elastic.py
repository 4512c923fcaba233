"""Elastic jobs: training with fewer or more nodes."""

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


class ScaleConfig(Config):
    """Settings for exactly this number of nodes."""

    nodes: Annotated[PositiveInt, Field(examples=[4])]
    """Number of nodes."""
    global_batch_size: PositiveInt | None = None
    """Samples in one optimizer step. Default: the job's `global_batch_size`."""
    micro_batch_size: PositiveInt | None = None
    """Samples that a rank computes at once. Default: the policy's `micro_batch_size`."""
    learning_rate_factor: PositiveFloat | None = None
    """Factor of the learning rate. Default: computed by the rule in `learning_rate`."""


class BatchPolicy(Config):
    """Batch of a step on each number of nodes. By default, neither the global batch nor the loss changes with the
    number."""

    micro_batch_size: PositiveInt | None = None
    """Samples that a rank computes at once. The global batch is divided into micro-batches of this size, which any
    number of ranks share, so it need not divide evenly among the ranks."""
    learning_rate: Literal["constant", "linear", "sqrt"] = "constant"
    """How the learning rate changes with a global batch that `scale_config` changes: not at all, in proportion, or with
    its square root.
    """
    scale_config: tuple[ScaleConfig, ...] = ()
    """Settings for single numbers of nodes, which replace the settings above."""

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
        ValueError: there is no micro-batch size, or it does not divide the global batch.
    """
    here = next((scale for scale in policy.scale_config if scale.nodes == nodes), ScaleConfig(nodes=nodes))
    batch = here.global_batch_size or global_batch_size
    micro = here.micro_batch_size or micro_batch_size or policy.micro_batch_size
    if micro is None:
        raise ValueError("micro_batch_size is missing")
    if batch % micro:
        raise ValueError(f"on {nodes} nodes, global_batch_size {batch} is not a multiple of micro_batch_size {micro}")
    ratio = batch / global_batch_size
    by_rule = {"constant": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[policy.learning_rate]
    return Batch(batch, micro, here.learning_rate_factor or by_rule)


class Notices(Config):
    """Notices that a node will be taken away. A node under our agent then leaves the job, which continues."""

    ec2: bool | None = None
    """Read Spot interruptions from EC2's instance metadata. Default: on EC2 machines."""
    file: Annotated[AbsolutePath, Field(examples=["/run/leave"])] | None = None
    """File on the node whose existence is a notice."""
    every_s: PositiveFloat = 5.0
    """Seconds between checks. EC2 announces an interruption two minutes before."""


class Elastic(Config):
    """Numbers of nodes that the job can run on, and changes between them."""

    min_nodes: Annotated[PositiveInt, Field(examples=[2])]
    """Fewest nodes that the job runs on. With fewer nodes it waits."""
    max_nodes: Annotated[PositiveInt, Field(examples=[8])]
    """Most nodes that the job uses if they are free. The job starts with `nodes`."""
    step: PositiveInt | None = None
    """Number of nodes by which the job grows and shrinks. Default: 1, unless `sizes` is set."""
    sizes: tuple[PositiveInt, ...] = ()
    """Instead of `step`: the only numbers of nodes that the job runs on, smallest first."""
    scaling_timeout_s: PositiveInt | None = None
    """Seconds that the engine waits for more nodes before it continues with the present ones."""
    graceful_shutdown_s: PositiveInt | None = None
    """Seconds for workers to save before they are stopped for another number of nodes."""
    faulty_scale_down_s: PositiveInt | None = None
    """Seconds that the engine waits for a replacement of a faulty node before the job continues without it."""
    batch: BatchPolicy = BatchPolicy()
    """Batch of a step on each number of nodes."""
    notices: Notices = Notices()
    """Notices that nodes will be taken away."""

    @model_serializer(mode="wrap")
    def _without_what_is_understood(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        if self.notices == Notices():
            del dumped["notices"]  # images with an older version do not know the field
        return dumped

    @model_validator(mode="after")
    def _one_way_to_step(self) -> Self:
        if self.step is not None and self.sizes:
            raise ContradictionError("step and sizes both set the allowed numbers of nodes; keep one of them", "step")
        return self
