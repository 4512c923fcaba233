"""Section of a job's spec for faults that do not end a process: hangs, non-finite numbers, unhealthy nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hyperpod_ext.config.base import Config


class HangPolicy(Config):
    """Time limits after which a worker without progress is killed and replaced.

    A worker may make no progress for `factor` times the duration of a slow step, and at least for `floor_s` seconds.
    Each call of the model counts as progress, so an evaluation inside a step, which calls the model repeatedly, is not
    a hang.
    """

    enabled: bool = True
    """Whether to detect hangs."""
    floor_s: PositiveFloat = 30.0
    """Seconds without progress that are always allowed, even if the steps of the job are short."""
    factor: Annotated[float, Field(gt=1)] = 10.0
    """Seconds without progress that are allowed, as a multiple of the duration of the job's slow steps so far."""
    first_step_s: PositiveFloat = 1800.0
    """Seconds without progress that are allowed in the job's first step, which may compile, and after its last step. In
    the first step after a fault, `factor` times the slowest first step so far is allowed."""
    heartbeat_s: PositiveFloat = 60.0
    """Seconds without a heartbeat after which a process counts as hung. A process sends no heartbeat if a signal has
    stopped it, or if a call holds Python's global interpreter lock."""
    dump_s: PositiveFloat = 2.0
    """Seconds that a hung worker gets to write the stack of every thread to its log before it is killed."""


class NanPolicy(Config):
    """Action for a step whose loss or gradients are not finite. All ranks take the same action."""

    action: Literal["off", "raise", "skip"] = "off"
    """Action for a step with non-finite numbers. `off`: no check. `raise`: the job fails with an error that names the
    step and the rank. `skip`: the step is skipped and changes no parameter."""
    max_skips: PositiveInt = 10
    """Maximum number of consecutive steps that may be skipped. If the next step must be skipped too, the job fails."""


class HealthPolicy(Config):
    """Health checks of a node before a worker starts on it. A node that fails a check is not used."""

    checks: tuple[Annotated[str, Field(min_length=1, examples=["disk"])], ...] = (
        "shared-memory",
        "disk",
        "network",
        "gpu",
    )
    """Health checks to run. An entry is the name of a built-in check, or `module:function` for a check of your own.
    Your function gets a HealthContext, and returns why the node is unhealthy, or None for a healthy node."""
    disk_mib: NonNegativeInt = 64
    """Free space in MiB that the disk of the run folder and the disk of every `file` tier must have."""
    timeout_s: PositiveFloat = 10.0
    """Seconds after which an unfinished health check fails, for example because a file system does not respond."""
