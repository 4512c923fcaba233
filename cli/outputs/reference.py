"""Outputs of commands that explain and examine."""

from __future__ import annotations

from dataclasses import dataclass

from hyperpod_ext.catalog.instances import Instance
from hyperpod_ext.jobs.job_files.job_report import ErrorDetails, Output, Seconds

from ..report.last_fault import LastFault


class RuleSummary(Output):
    """One rule of a list."""

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
    """Names of its child fields."""
    aws_tiers: list[str]
    """Tiers of AWS's checkpointless training that the field belongs to."""


@dataclass(frozen=True, slots=True)
class UsableInstance(Instance):
    """One instance type, with the resources that pods can use."""

    usable_cpus: float
    """CPUs for pods."""
    usable_memory_mib: int
    """Memory for pods."""


class KeptState(Output):
    """Content of a job's snapshots."""

    objects: dict[str, str] | None
    """Types of the objects, by name; null before the job's first step."""
    left_out: list[str]
    in_no_snapshot: list[str]


class HeldTier(Output):
    """One tier of a job."""

    tier: str
    kind: str
    every_steps: int | str | None = None
    every_s: Seconds | None = None
    newest_step: int | None
    """Newest step that all ranks have there."""
    error: str | None


class BudgetsLeft(Output):
    """Faults that a job still recovers from."""

    restarts: int
    max_restarts: int
    restarts_in_window: int | None
    window_s: Seconds
    node_losses: int
    max_node_losses: int
    spares: int


class JobHealth(Output):
    """A local job, of `hp-ext doctor --job`."""

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
    """Next faults, and the outcome of each."""
