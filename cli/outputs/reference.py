"""Models of the outputs of `hp-ext explain`, `hp-ext instances` and `hp-ext doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from hyperpod_ext.catalog.instances import Instance
from hyperpod_ext.jobs.job_files.job_report import ErrorDetails, Output, Seconds

from ..report.last_fault import LastFault


class RuleSummary(Output):
    """One rule in the list of rules."""

    id: str
    severity: str
    title: str


class RuleOutput(RuleSummary):
    """One rule."""

    cause: str
    fix: str


class FieldOutput(Output):
    """One field of a spec."""

    path: str
    description: str
    type: str | None
    default: str | None
    example: str | None
    fields: list[str]
    """Names of the fields inside this field."""
    aws_tiers: list[str]
    """Tiers of AWS's checkpointless training that the field belongs to."""


@dataclass(frozen=True, slots=True)
class UsableInstance(Instance):
    """One instance type, with the resources that pods can use."""

    usable_cpus: float
    """Number of CPUs that pods can use on one machine."""
    usable_memory_mib: int
    """Memory in MiB that pods can use on one machine."""


class KeptState(Output):
    """Objects that a job's snapshots contain, and objects that they do not contain."""

    objects: dict[str, str] | None
    """Types of the objects in snapshots, by the objects' names; null before the job's first step."""
    left_out: list[str]
    in_no_snapshot: list[str]


class HeldTier(Output):
    """One checkpoint tier of a job, and the newest step in it."""

    tier: str
    kind: str
    every_steps: int | str | None = None
    every_s: Seconds | None = None
    newest_step: int | None
    """Newest step that all ranks have saved to this tier; null if there is none."""
    error: str | None


class BudgetsLeft(Output):
    """Numbers of further faults that a job can recover from, and the limits of the numbers."""

    restarts: int
    max_restarts: int
    restarts_in_window: int | None
    window_s: Seconds
    node_losses: int
    max_node_losses: int
    spares: int


class JobHealth(Output):
    """Output of `hp-ext doctor --job`: the state of a local job."""

    job: str
    state: str
    step: int | None
    of: int | None
    error: ErrorDetails | None
    kept: KeptState
    held: list[HeldTier]
    faults: int
    last_fault: LastFault | None
    budgets: BudgetsLeft
    next: list[tuple[str, str]]
    """Descriptions of possible next faults, each with its expected outcome."""
