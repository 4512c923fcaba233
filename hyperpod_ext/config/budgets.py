"""How often and how long: starts anew by the platform, time limits, and rules about what workers print."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config


class Relaunch(Config):
    """When a fault cannot be mended inside the running job, the platform starts it anew, and how often.

    `restart` says what is mended inside; this is the escalation level above it.
    """

    max_times: NonNegativeInt | None = None
    """Times that the whole job is started anew before it has failed. Default: what the platform does."""
    after_restarts: PositiveInt | None = None
    """Restarts of processes within `window_s` after which the whole job is started anew instead."""
    window_s: PositiveInt = 3600
    """Seconds over which restarts are counted; older ones are forgotten."""
    max_process_restarts: PositiveInt | None = None
    """Restarts of processes by the platform, over the whole job, before it has failed."""
    avoid_nodes: NonNegativeInt | None = None
    """Nodes that failed again and again which the next start does without, at most."""
    scale_up_pause_s: NonNegativeInt | None = None
    """Seconds after a restart in which an elastic job takes no more nodes."""


class Timeouts(Config):
    """Limits on the time of the whole job."""

    run_s: PositiveInt | None = None
    """Seconds that the job may run; then it is ended, and has failed."""
    start_s: PositiveInt | None = None
    """Seconds from the first pod to the first step of all."""
    fault_s: PositiveInt | None = None
    """Seconds that recovery from one fault may take."""
    keep_s: NonNegativeInt | None = None
    """Seconds after its end when the job and its logs are deleted. Default: never."""


class LogRule(Config):
    """A pattern in the lines that rank 0 itself prints, by which a hang, a slow job or a fault is told."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_]{0,62}$", examples=["loss-is-printed"])]
    """Name of the rule; it is in the cause of a fault."""
    pattern: Annotated[str, Field(min_length=1, examples=[".*loss: ([0-9.]+).*"])]
    """Regular expression (Python's, from the start of the line); its first group is the number that `threshold`
    is about."""
    stop_pattern: Annotated[str, Field(min_length=1)] | None = None
    """After a line that matches this, the rule is not applied any more."""
    first_within_s: PositiveInt | None = None
    """Seconds from the start in which the first match must come, or the job hangs."""
    every_s: PositiveInt | None = None
    """Seconds in which the next match must follow, or the job hangs."""
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Number that the first group of `pattern` is compared with."""
    operator: Literal["gt", "gteq", "lt", "lteq", "eq"] | None = None
    """The job is slow while the number is `gt`, `gteq`, `lt`, `lteq` or `eq` to `threshold`."""
    data_points: PositiveInt = 1
    """Matches in a row that must be so."""
    fault_on_match: bool = False
    """A match is a fault by itself."""
