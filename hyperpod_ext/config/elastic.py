"""How a job may go on with fewer nodes, or take more."""

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
    """What is otherwise on exactly this many nodes."""

    nodes: Annotated[PositiveInt, Field(examples=[4])]
    """Number of nodes that this is for."""
    global_batch_size: PositiveInt | None = None
    """Samples in one optimizer step there. Default: the job's."""
    micro_batch_size: PositiveInt | None = None
    """Samples that a rank computes at once there. Default: that of the policy."""
    learning_rate_factor: PositiveFloat | None = None
    """What the learning rate is multiplied with there. Default: what `learning_rate` says."""


class BatchPolicy(Config):
    """What a step is on each number of nodes. By itself the global batch stays the same, and the loss with it."""

    micro_batch_size: PositiveInt | None = None
    """Samples that a rank computes at once. The global batch is cut into micro-batches of this size, which any number
    of ranks share: it need then not divide among the ranks."""
    learning_rate: Literal["constant", "linear", "sqrt"] = "constant"
    """How the learning rate follows the global batch where `scale_config` changes that: not at all, in proportion,
    or with its square root."""
    scale_config: tuple[ScaleConfig, ...] = ()
    """Numbers of nodes on which something is otherwise."""

    @model_validator(mode="after")
    def _each_size_once(self) -> Self:
        sizes = [scale.nodes for scale in self.scale_config]
        if len(sizes) != len(set(sizes)):
            raise ContradictionError("scale_config names a number of nodes twice; keep one of the two", "scale_config")
        return self


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step is on one number of nodes."""

    global_batch_size: int
    micro_batch_size: int
    learning_rate_factor: float


def batch_at(policy: BatchPolicy, nodes: int, global_batch_size: int, micro_batch_size: int | None = None) -> Batch:
    """What a step is on `nodes` nodes, where the job asks for `global_batch_size`. Pure.

    Raises:
        ValueError: there is no micro-batch size, or it does not divide the global batch.
    """
    here = next((scale for scale in policy.scale_config if scale.nodes == nodes), ScaleConfig(nodes=nodes))
    batch = here.global_batch_size or global_batch_size
    micro = here.micro_batch_size or micro_batch_size or policy.micro_batch_size
    if micro is None:
        raise ValueError("no micro_batch_size is given")
    if batch % micro:
        raise ValueError(f"on {nodes} nodes, global_batch_size {batch} is not a multiple of micro_batch_size {micro}")
    ratio = batch / global_batch_size
    by_rule = {"constant": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[policy.learning_rate]
    return Batch(batch, micro, here.learning_rate_factor or by_rule)


class Notices(Config):
    """How a node under our agent hears that it will be taken away. It then leaves the job, which goes on without it."""

    ec2: bool | None = None
    """Ask EC2's instance metadata whether a Spot instance is to be interrupted. Default: on machines of EC2."""
    file: Annotated[AbsolutePath, Field(examples=["/run/leave"])] | None = None
    """A file of the node that says so by being there."""
    every_s: PositiveFloat = 5.0
    """Seconds between two looks. EC2 tells of an interruption two minutes ahead."""


class Elastic(Config):
    """Numbers of nodes that the job can run on, and how it goes from one to another."""

    min_nodes: Annotated[PositiveInt, Field(examples=[2])]
    """Fewest nodes that the job goes on with; with fewer it waits."""
    max_nodes: Annotated[PositiveInt, Field(examples=[8])]
    """Most nodes that it takes when they are free. `nodes` is how many it starts with."""
    step: PositiveInt | None = None
    """It grows and shrinks by this many nodes at once. Default 1, unless `sizes` are given."""
    sizes: tuple[PositiveInt, ...] = ()
    """Instead of `step`: the only numbers of nodes that it runs on, smallest first."""
    scaling_timeout_s: PositiveInt | None = None
    """Seconds that the engine waits for more nodes before it goes on with those it has."""
    graceful_shutdown_s: PositiveInt | None = None
    """Seconds that workers have to save before they are ended for another number of nodes."""
    faulty_scale_down_s: PositiveInt | None = None
    """Seconds that the engine waits for a replacement of a faulty node before the job goes on without it."""
    batch: BatchPolicy = BatchPolicy()
    """What a step is on each number of nodes."""
    notices: Notices = Notices()
    """How nodes hear that they will be taken away."""

    @model_serializer(mode="wrap")
    def _without_what_is_understood(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        if self.notices == Notices():
            del dumped["notices"]  # containers that are older do not know it
        return dumped

    @model_validator(mode="after")
    def _one_way_to_step(self) -> Self:
        if self.step is not None and self.sizes:
            raise ContradictionError("step and sizes are two ways to say the same; give one of them", "step")
        return self
