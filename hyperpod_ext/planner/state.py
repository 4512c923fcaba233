"""Computes the size of one copy of the training state in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from hyperpod_ext.config.files.nearest import suggest
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.planner.shapes import Decoder

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Number of bytes of one value, by the name of its type."""


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Number types of all values that the training state has for each parameter."""

    weights: str = "bf16"
    master: str | None = None
    """Number type of the master weights, a second copy of the weights that the optimizer updates. None: no master
    weights."""
    moments: tuple[str, ...] = ("fp32", "fp32")
    """Number types of the optimizer's moments: two for Adam, one for SGD with momentum, none for plain SGD."""
    ema: str | None = None
    """Number type of an exponential moving average of the weights. None: no moving average."""
    step_counters: bool = True
    """Whether the optimizer keeps a step counter in fp32 for each tensor, as torch's Adam does."""

    def __post_init__(self) -> None:
        for name in (self.weights, self.master, self.ema, *self.moments):
            if name is not None and name not in BYTES:
                raise ConfigError([Problem(f"there is no type {name!r}", hint=suggest(name, BYTES))])

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of state for each parameter: weight, master weight, moving average and moments."""
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
"""Common formats of the training state, by name, with 2, 6, 8, 10, 12, 14 and 18 bytes per parameter. AWS assumes 8
bytes per parameter for its figure of 521 GB for a 70B model."""


def state_format(name: str) -> StateFormat:
    """Return the state format with the name `name`.

    Raises:
        ConfigError: there is no state format with this name.
    """
    if name not in FORMATS:
        raise ConfigError([Problem(f"there is no format {name!r}", hint=suggest(name, FORMATS))])
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class StateSize:
    """Size of one copy of the training state: number of parameters, and bytes."""

    parameters: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes / 1e9:,.2f} GB ({self.nbytes / 2**30:,.2f} GiB)"


def size_of(model: Decoder, format: StateFormat) -> StateSize:
    """Return the exact size of the training state of `model`. Buffers are assumed to be fp32."""
    tensors = [prod(shape) for _, shape in model.parameters()]
    counters = 4 * len(tensors) if format.step_counters and format.moments else 0
    buffers = 4 * sum(prod(shape) for _, shape in model.buffers())
    return StateSize(sum(tensors), sum(tensors) * format.bytes_per_parameter + counters + buffers)


def size_of_count(parameters: int, format: StateFormat) -> StateSize:
    """Return the size of the training state of a model with `parameters` parameters. Buffers and step counters are not
    included."""
    return StateSize(parameters, parameters * format.bytes_per_parameter)
