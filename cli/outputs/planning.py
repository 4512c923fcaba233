"""Models of the outputs of commands that plan a job."""

from __future__ import annotations

from hyperpod_ext.config.scales import Scale
from hyperpod_ext.jobs.job_files.job_report import Number, Output


class TierEstimate(Output):
    """The part of a goodput estimate about one tier."""

    tier: str
    every_steps: int | None
    """Steps between saves to this tier; null if nothing is saved to this tier."""
    interval_s: Number
    blocked_s: Number
    """Seconds for which one save blocks training."""
    latency_s: Number
    """Seconds from the start of a save until the save can be restored."""
    restart_s: Number
    failures_a_day: dict[str, Number]
    """Failures per day that this tier recovers, by class of failure."""
    lost_steps_a_failure: Number


class UsdLost(Output):
    """US dollars that failures and saves cost, per month and per failure."""

    a_month: Number
    a_failure: Number


class GoodputOutput(Output):
    """Expected goodput of a job with given intervals between saves."""

    goodput: Number
    """Share of the job's time that is spent on steps that are kept, from 0 to 1."""
    failures_a_month: Number
    lost_steps_a_month: Number
    tiers: list[TierEstimate]
    usd_lost: UsdLost | None = None
    """Cost of failures and saves; null if the price of a node is unknown."""


class StateOutput(Output):
    """Size of one copy of the training state, over all ranks."""

    what: str
    parameters: Number | None
    bytes: Number
    gb: Number
    gib: Number


class PlanOutput(Output):
    """Output of `hp-ext plan`: the best intervals between saves, and their cost."""

    state: StateOutput
    nodes: int
    workers_per_node: int
    step_s: Number
    memory_per_node_bytes: int
    failures_a_day: Number
    plan: GoodputOutput
    """Goodput with the best intervals."""
    as_written: GoodputOutput | None
    """Goodput with the intervals in the spec; null if the spec does not set all intervals in steps."""
    without: dict[str, GoodputOutput]
    """Goodput of variants of the job that lack a feature, by a description of the variant."""
    set: list[str]
    """The best intervals, as values for `--set` options."""
    notes: list[str]
    warnings: list[str]


class Goodput(Output):
    """Mean goodput of all simulated jobs."""

    mean: Number
    margin_95: Number | None
    """Half the width of the mean's 95 % confidence interval; null if only one job was simulated."""


class SimulatedJob(Output):
    """One simulated job."""

    goodput: Number
    steps: int
    lost_steps: int
    seconds: dict[str, Number]
    faults: dict[str, int]
    """Number of failures, by class of failure."""
    fell_back_to: dict[str, int]
    """Number of restores, by the tier that was read."""
    sources: dict[str, int]
    relaunches: int
    given_up: list[str]
    """Reasons why the job gave up and failed."""
    traffic_gb: dict[str, Number]


class SimulateOutput(Output):
    """Output of `hp-ext simulate`: the simulated jobs."""

    nodes: int
    spares: int
    days: Number
    runs: int
    seed: int
    every_steps: dict[str, int]
    """Number of steps between saves, by tier."""
    goodput: Goodput
    planner: Number
    """Goodput that `hp-ext plan` computes for the same job."""
    each: list[SimulatedJob]
    notes: list[str]
    warnings: list[str]


class ScalesOutput(Output):
    """Output of `hp-ext scales`: how a global batch divides for each number of nodes."""

    file: str
    at_least: Number
    scales: list[Scale]
    replicaDiscreteValues: list[int]  # noqa: N815  (the operator's name)
    """Numbers of nodes whose efficiency is at least `at_least`."""
