"""How a job may go on with fewer nodes, or take more."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from hyperpod_ext.config.base import Config


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

    @model_validator(mode="after")
    def _one_way_to_step(self) -> Self:
        if self.step is not None and self.sizes:
            raise ValueError("step and sizes are two ways to say the same; give one of them")
        return self
