"""Detection of faults that do not end a process: hangs, non-finite numbers, unhealthy nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hyperpod_ext.config.base import Config


class HangPolicy(Config):
    """When a worker without progress is killed and replaced.

    The limit is `factor` times the duration of the job's steps, and at least `floor_s`. The limit applies to the time
    since the last sign of progress, so an evaluation inside a step, which calls the model repeatedly, is not a hang.
    """

    enabled: bool = True
    """Whether to detect hangs."""
    floor_s: PositiveFloat = 30.0
    """Lowest limit, in seconds without progress."""
    factor: Annotated[float, Field(gt=1)] = 10.0
    """Factor by which the limit exceeds the duration of the job's slow steps so far."""
    first_step_s: PositiveFloat = 1800.0
    """Limit for the job's first step, which may compile, and for the time after the last one. The limit for the first
    step after a fault is `factor` times the slowest first step."""
    heartbeat_s: PositiveFloat = 60.0
    """Seconds without a heartbeat after which a process counts as hung. Such a process is stopped, or in a call that
    holds Python's global lock."""
    dump_s: PositiveFloat = 2.0
    """Seconds for a worker to write the stack of every thread to its log before it is killed."""


class NanPolicy(Config):
    """Action for a step whose loss or gradients are not finite. All ranks take the same action."""

    action: Literal["off", "raise", "skip"] = "off"
    """`raise`: the job fails, with the step and rank. `skip`: the step is skipped without changes."""
    max_skips: PositiveInt = 10
    """Consecutive steps that may be skipped before the job fails."""


class HealthPolicy(Config):
    """Checks of a node before a worker starts on it. A node that fails is not used."""

    checks: tuple[Annotated[str, Field(min_length=1, examples=["disk"])], ...] = (
        "shared-memory",
        "disk",
        "network",
        "gpu",
    )
    """Names of checks, or `module:function` of your own, which takes a HealthContext and returns why the node is
    unhealthy, or None."""
    disk_mib: NonNegativeInt = 64
    """Free space that the run folder's disk, and every `file` tier's, must have."""
    timeout_s: PositiveFloat = 10.0
    """Seconds after which a check fails, for example because a file system does not respond."""
