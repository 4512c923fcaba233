"""Sections of a job's spec: restarts by the platform, time limits, and patterns for log lines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config


class Relaunch(Config):
    """Restarts of the whole job by the platform, for faults that the running job cannot recover from.

    The section `restart` configures the recovery inside the running job, which is tried first.
    """

    max_times: NonNegativeInt | None = None
    """Maximum number of restarts of the whole job, which fails if it needs one more. Default: the platform's
    default."""
    after_restarts: PositiveInt | None = None
    """Number of process restarts within `window_s` seconds after which the whole job is restarted instead."""
    window_s: PositiveInt = 3600
    """Seconds for which `after_restarts` counts a process restart. Older process restarts are ignored."""
    max_process_restarts: PositiveInt | None = None
    """Maximum number of process restarts by the platform over the whole job, which fails if it needs one more."""
    avoid_nodes: NonNegativeInt | None = None
    """Maximum number of repeatedly failing nodes that a restart of the job excludes."""
    scale_up_pause_s: NonNegativeInt | None = None
    """Seconds after a restart during which an elastic job gets no additional nodes."""


class Timeouts(Config):
    """Time limits of the whole job."""

    run_s: PositiveInt | None = None
    """Seconds that the job may run. A job that runs longer is stopped and fails."""
    start_s: PositiveInt | None = None
    """Maximum seconds from the start of the first pod to the first training step."""
    fault_s: PositiveInt | None = None
    """Maximum seconds that recovery from one fault may take."""
    keep_s: NonNegativeInt | None = None
    """Seconds from the end of the job until the job and its logs are deleted. Default: never."""


class LogRule(Config):
    """A pattern for the output of rank 0 that detects a hang, a slow job or a fault."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_]{0,62}$", examples=["loss-is-printed"])]
    """Name of the rule. The name is part of the cause of each fault that the rule detects."""
    pattern: Annotated[str, Field(min_length=1, examples=[".*loss: ([0-9.]+).*"])]
    """Regular expression in Python's syntax, matched from the start of the line. The first group of the expression is
    the number that is compared with `threshold`."""
    stop_pattern: Annotated[str, Field(min_length=1)] | None = None
    """Regular expression of a line after which the rule no longer applies."""
    first_within_s: PositiveInt | None = None
    """Maximum seconds from the start of training, or from its continuation after a fault, to the first line that
    matches `pattern`. The job counts as hung if no line matches within this time."""
    every_s: PositiveInt | None = None
    """Maximum seconds between two lines that match `pattern`. After a longer pause, the job counts as hung."""
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Number that the first group of `pattern` is compared with."""
    operator: Literal["gt", "gteq", "lt", "lteq", "eq"] | None = None
    """The job is slow while the number in its output is `gt` (>), `gteq`, `lt`, `lteq` or `eq` (=) `threshold`."""
    data_points: PositiveInt = 1
    """Number of consecutive matches that must satisfy `operator` and `threshold` before the job counts as slow."""
    fault_on_match: bool = False
    """Whether a line that matches `pattern` counts as a fault."""
