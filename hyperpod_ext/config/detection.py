"""How faults are found out that do not end a process by themselves: hangs, numbers that are none, ill nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hyperpod_ext.config.base import Config


class HangPolicy(Config):
    """When a worker that shows no sign of progress is ended and replaced as if it had died.

    The limit follows from the job's own steps: `factor` times what its steps take, and never less than
    `floor_s`. What counts is the time since the last sign of progress, so an evaluation inside a step, which
    calls the model again and again, is none.
    """

    enabled: bool = True
    """Whether to look for hangs."""
    floor_s: PositiveFloat = 30.0
    """Seconds without progress that are never taken for a hang."""
    factor: Annotated[float, Field(gt=1)] = 10.0
    """Slow steps, as the job has made them so far, times this is the limit."""
    first_step_s: PositiveFloat = 1800.0
    """Limit for the first step of all, which may compile, and for what comes after the last one. The first step
    after a fault has `factor` times what the slowest first step took."""
    heartbeat_s: PositiveFloat = 60.0
    """Seconds that a process may be silent, at any time: stopped, or in a call that keeps Python's lock."""
    dump_s: PositiveFloat = 2.0
    """Seconds a worker has to write the stack of every thread to its log before it is ended."""


class NanPolicy(Config):
    """What becomes of a step whose loss or gradients are not finite. All ranks do the same."""

    action: Literal["off", "raise", "skip"] = "off"
    """`raise`: the job ends, and says which step and rank. `skip`: the step changes nothing, and the next follows."""
    max_skips: PositiveInt = 10
    """Steps in a row that may be skipped before the job ends all the same."""


class HealthPolicy(Config):
    """What a node is asked before a worker is started on it. A node that fails is not used."""

    checks: tuple[Annotated[str, Field(min_length=1, examples=["disk"])], ...] = (
        "shared-memory",
        "disk",
        "network",
        "gpu",
    )
    """Names of checks, or `module:function` of your own: called with a HealthContext, it returns why the node
    is ill, or nothing."""
    disk_mib: NonNegativeInt = 64
    """Room that the run folder's disk, and every `file` tier's, must have."""
    timeout_s: PositiveFloat = 10.0
    """A check that takes longer has failed: a file system that does not answer is ill."""
