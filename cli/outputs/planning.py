"""Outputs of commands that plan a job."""

from __future__ import annotations

from hyperpod_ext.config.scales import Scale
from hyperpod_ext.jobs.job_files.job_report import Number, Output


class TierEstimate(Output):
    """A tier that state is restored from."""

    tier: str
    every_steps: int | None
    """Steps between saves; null if nothing is saved in this tier."""
    interval_s: Number
    blocked_s: Number
    """Seconds that a save blocks training."""
    latency_s: Number
    """Seconds from the start of a save until it can be restored."""
    restart_s: Number
    failures_a_day: dict[str, Number]
    """Failures a day that this tier recovers from, by class."""
    lost_steps_a_failure: Number


class UsdLost(Output):
    """Money that failures and saves cost."""

    a_month: Number
    a_failure: Number


class GoodputOutput(Output):
    """Expected goodput with one choice of intervals."""

    goodput: Number
    """Share of time that is spent on kept steps, 0 to 1."""
    failures_a_month: Number
    lost_steps_a_month: Number
    tiers: list[TierEstimate]
    usd_lost: UsdLost | None = None
    """Set only if the price of a node is known."""


class StateOutput(Output):
    """Size of the training state: one copy, all ranks."""

    what: str
    parameters: Number | None
    bytes: Number
    gb: Number
    gib: Number


class PlanOutput(Output):
    """A job's best intervals, and their cost."""

    state: StateOutput
    nodes: int
    workers_per_node: int
    step_s: Number
    memory_per_node_bytes: int
    failures_a_day: Number
    plan: GoodputOutput
    """Goodput with the best intervals."""
    as_written: GoodputOutput | None
    """Goodput with the spec's intervals; null if the spec does not set them."""
    without: dict[str, GoodputOutput]
    """Goodput without each single tier, by tier."""
    set: list[str]
    """The best intervals, as values of `--set`."""
    notes: list[str]
    warnings: list[str]


class Goodput(Output):
    """Mean of all simulated jobs."""

    mean: Number
    margin_95: Number | None
    """Half of the 95 % confidence interval; null if one job was simulated."""


class SimulatedJob(Output):
    """One simulated job."""

    goodput: Number
    steps: int
    lost_steps: int
    seconds: dict[str, Number]
    faults: dict[str, int]
    """Number of failures, by class."""
    fell_back_to: dict[str, int]
    """Number of restores from each tier."""
    sources: dict[str, int]
    relaunches: int
    given_up: list[str]
    """Why the job gave up."""
    traffic_gb: dict[str, Number]


class SimulateOutput(Output):
    """Simulated jobs."""

    nodes: int
    spares: int
    days: Number
    runs: int
    seed: int
    every_steps: dict[str, int]
    """Steps between saves, by tier."""
    goodput: Goodput
    planner: Number
    """Goodput that `hp-ext plan` expects."""
    each: list[SimulatedJob]
    notes: list[str]
    warnings: list[str]


class ScalesOutput(Output):
    """Numbers of nodes, and how a global batch divides among them."""

    file: str
    at_least: Number
    scales: list[Scale]
    replicaDiscreteValues: list[int]  # noqa: N815  (the operator's name)
    """Numbers of nodes that are efficient enough."""
