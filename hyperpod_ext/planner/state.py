"""Bytes of one copy of the training state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from hyperpod_ext.config.files.nearest import suggest
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.planner.shapes import Decoder

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one number of each type."""


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Types of the state of each parameter."""

    weights: str = "bf16"
    master: str | None = None
    """Type of a second copy of the weights, which the optimizer updates."""
    moments: tuple[str, ...] = ("fp32", "fp32")
    """Types of the optimizer's moments: two for Adam, one for momentum, none for plain SGD."""
    ema: str | None = None
    """Type of a running mean of the weights."""
    step_counters: bool = True
    """Whether the optimizer counts steps for each tensor, in fp32, as torch's Adam does."""

    def __post_init__(self) -> None:
        for name in (self.weights, self.master, self.ema, *self.moments):
            if name is not None and name not in BYTES:
                raise ConfigError([Problem(f"there is no type {name!r}", hint=suggest(name, BYTES))])

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of all state that has one number for each parameter."""
        return sum(BYTES[name] for name in (self.weights, self.master, self.ema, *self.moments) if name)


FORMATS: Mapping[str, StateFormat] = {
    "weights": StateFormat("bf16", moments=(), step_counters=False),
    "bf16": StateFormat("bf16", moments=("bf16", "bf16")),
    "fp32+bf16-adam": StateFormat("fp32", moments=("bf16", "bf16")),
    "bf16+fp32-adam": StateFormat("bf16"),
    "fp32": StateFormat("fp32"),
    "mixed": StateFormat("bf16", master="fp32"),
    "mixed+ema": StateFormat("bf16", master="fp32", ema="fp32"),
}
"""Common formats of the state, with 2, 6, 8, 10, 12, 14 and 18 bytes per parameter. AWS counts 8 for its 521 GB of a
70B model."""


def state_format(name: str) -> StateFormat:
    """Return the format of this name.

    Raises:
        ConfigError: there is no format of this name.
    """
    if name not in FORMATS:
        raise ConfigError([Problem(f"there is no format {name!r}", hint=suggest(name, FORMATS))])
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class StateSize:
    """One copy of the state, in numbers and bytes."""

    parameters: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes / 1e9:,.2f} GB ({self.nbytes / 2**30:,.2f} GiB)"


def size_of(model: Decoder, format: StateFormat) -> StateSize:
    """Return the exact size of `model`'s state. Buffers are fp32."""
    tensors = [prod(shape) for _, shape in model.parameters()]
    counters = 4 * len(tensors) if format.step_counters and format.moments else 0
    buffers = 4 * sum(prod(shape) for _, shape in model.buffers())
    return StateSize(sum(tensors), sum(tensors) * format.bytes_per_parameter + counters + buffers)


def size_of_count(parameters: int, format: StateFormat) -> StateSize:
    """Return the size of a state from its number of parameters."""
    return StateSize(parameters, parameters * format.bytes_per_parameter)
