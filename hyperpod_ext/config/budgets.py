"""Restarts by the platform, time limits, and rules about log lines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config


class Relaunch(Config):
    """Restarts of the whole job by the platform, for faults that the running job cannot recover from.

    This is the escalation level above `restart`, which recovers inside the running job.
    """

    max_times: NonNegativeInt | None = None
    """Restarts of the whole job before it fails. Default: the platform's default."""
    after_restarts: PositiveInt | None = None
    """Restarts of processes within `window_s` after which the whole job is restarted instead."""
    window_s: PositiveInt = 3600
    """Seconds in which restarts are counted; older ones are ignored."""
    max_process_restarts: PositiveInt | None = None
    """Restarts of processes by the platform, over the whole job, before it fails."""
    avoid_nodes: NonNegativeInt | None = None
    """Most nodes with repeated failures that the next start excludes."""
    scale_up_pause_s: NonNegativeInt | None = None
    """Seconds after a restart in which an elastic job does not grow."""


class Timeouts(Config):
    """Limits on the time of the whole job."""

    run_s: PositiveInt | None = None
    """Seconds that the job may run. After this time the job is stopped and fails."""
    start_s: PositiveInt | None = None
    """Seconds from the first pod to the first step."""
    fault_s: PositiveInt | None = None
    """Seconds that recovery from one fault may take."""
    keep_s: NonNegativeInt | None = None
    """Seconds from the end of the job until the job and its logs are deleted. Default: never."""


class LogRule(Config):
    """A pattern in rank 0's own output that detects a hang, a slow job or a fault."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_]{0,62}$", examples=["loss-is-printed"])]
    """Name of the rule, which is part of a fault's cause."""
    pattern: Annotated[str, Field(min_length=1, examples=[".*loss: ([0-9.]+).*"])]
    """Regular expression (Python's, from the start of the line). The first group of the expression is the number for
    `threshold`."""
    stop_pattern: Annotated[str, Field(min_length=1)] | None = None
    """Regular expression of a line after which the rule no longer applies."""
    first_within_s: PositiveInt | None = None
    """Seconds from the start until the first match; later, the job counts as hung."""
    every_s: PositiveInt | None = None
    """Seconds until the next match; later, the job counts as hung."""
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Number that the first group of `pattern` is compared with."""
    operator: Literal["gt", "gteq", "lt", "lteq", "eq"] | None = None
    """The job is slow while the number is `gt`, `gteq`, `lt`, `lteq` or `eq` to `threshold`."""
    data_points: PositiveInt = 1
    """Consecutive matches that must satisfy `operator` and `threshold`."""
    fault_on_match: bool = False
    """Treat a match as a fault."""
