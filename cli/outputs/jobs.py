"""Outputs of commands on jobs."""

from __future__ import annotations

from typing import Any, Literal

from hyperpod_ext.jobs.job_files.job_report import ErrorDetails, Number, Output, ReportOutput, Seconds


class StatusOutput(Output):
    """One job."""

    name: str
    handle: str
    """The job's URL, `local:///tiny-gpt`."""
    state: str
    """starting, running, comparing, succeeded, failed or cancelled."""
    step: int | None
    """Newest finished step."""
    of: int | None
    """Number of steps of the whole job."""
    submitted_at: str
    ended_at: str | None
    error: ErrorDetails | None
    folder: str
    """Folder of the job's logs."""


class RankNow(Output):
    """One rank in `hp-ext top`."""

    rank: int
    node: int | None
    phase: str
    step: int | None
    step_s: Seconds | None


class TierNow(Output):
    """One tier in `hp-ext top`."""

    newest_step: int | None


class TopOutput(Output):
    """A running job."""

    name: str | None = None
    handle: str | None = None
    state: str
    step: int | None
    of: int | None
    loss: Number | None
    step_s: Seconds | None
    """Newest finished step of the slowest rank."""
    left_s: Seconds | None
    """Estimated seconds until the last step."""
    goodput: float | None
    """Share of all ranks' time that was spent on kept steps, 0 to 1."""
    world_size: int | None
    nodes: int | None
    generation: int
    faults: int
    recoveries: int
    steps_lost: int
    nodes_lost: int
    seconds: dict[str, Seconds]
    """Seconds in each phase, summed over all ranks."""
    tiers: dict[str, TierNow]
    ranks: list[RankNow]


class PlannedFiles(Output):
    """Files that would be submitted."""

    target: str
    name: str
    world_size: int
    nodes: int
    workers_per_node: int
    warnings: list[str]
    files: dict[str, str]
    """Text of each file, by its name."""


class WrittenFiles(Output):
    """Files that `hp-ext render --out` wrote."""

    written: list[str]


class Accepted(Output):
    """A job that the target's server would accept, of `--server-dry-run`."""

    name: str
    target: str
    accepted: Literal[True]


class Submitted(Output):
    """A submitted job."""

    name: str
    target: str
    handle: str
    """The job's URL."""


class EndedOutput(Output):
    """An ended job without a report on this machine."""

    name: str
    target: str
    handle: str
    state: str
    error: ErrorDetails | None
    submitted_at: str
    ended_at: str | None


Result = ReportOutput | EndedOutput


class ValidOutput(Output):
    """A spec without mistakes."""

    valid: Literal[True]
    file: str
    name: str
    world_size: int
    target: str | None
    warnings: list[str]


class ValidTemplates(Output):
    """A folder of templates without mistakes."""

    valid: Literal[True]
    templates: list[str]


class Imported(Output):
    """A spec made from another tool's file."""

    target: str
    job: dict[str, Any]
    """The spec, as `hp-ext schema` describes it."""
    left_out: list[str]
    """Parts of the file that the spec cannot express."""
    notes: list[str]


class ImportedFile(Output):
    """One file of an imported folder."""

    file: str
    outcome: Literal["carried", "named", "refused"]
    """`named`: converted, except the parts in `left_out`."""
    target: str | None
    job: dict[str, Any] | None
    left_out: list[str]
    notes: list[str]
    problems: list[str]


class ImportedFolder(Output):
    """All files of a folder."""

    files: int
    carried: int
    named: int
    refused: int
    results: list[ImportedFile]


class OrderedResize(Output):
    """A request that was sent with `--no-wait`."""

    order: str
    nodes: int


class OrderedMove(Output):
    """A request that was sent with `--no-wait`."""

    order: str
    node: str


class ResizeOutput(Output):
    """A job that was resized. Fields with a default are missing if the target does not report them."""

    of: int
    """Number of nodes before the resize."""
    nodes: int
    event: Literal["resized"] = "resized"
    t: Seconds | None = None
    order: str = ""
    generation: int | None = None
    world_size: int | None = None
    cause: str = ""
    step: int | None = None
    """Last step before the resize."""
    pause_s: Seconds | None = None
    """Seconds without a step."""
    pids_kept: bool | None = None
    local_share: float | None = None
    """Share of the state that stayed on its node."""
    full_size: int | None = None
    samples: str = ""
    given_back: list[str] = []
    """Nodes that were returned to Slurm."""
    kept: list[str] = []
    """Nodes that left the job and stay in its allocation."""
    why_kept: str = ""


class MoveOutput(ResizeOutput):
    """A node whose ranks moved to a spare."""

    node: int
    to: int | None
    """Node that has the ranks now."""
    drain: str = ""
    """The node's name in Slurm, if it was drained."""
    why_no_drain: str = ""


class ChaosOutput(Output):
    """A fault that was requested."""

    order: str
    kind: str
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    phase: str | None = None
    how: str | None = None
    seconds: Seconds | None = None
    steps: int | None = None


class Condition(Output):
    """A condition of a job on Kubernetes."""

    type: str | None
    status: str | None
    reason: str | None
    message: str | None
    at: str | None


class Pod(Output):
    """A pod of a job."""

    name: str
    phase: str | None
    node: str | None
    restarts: int
    why: str | None
    """Why the pod does not run."""


class PodEvent(Output):
    """An event of a job or of its pods."""

    at: str | None
    type: str | None
    reason: str | None
    object: str
    count: int
    message: str | None


class DescribeOutput(StatusOutput):
    """A job with its pods. Fields are null if the target has no pods."""

    conditions: list[Condition] | None
    pods: list[Pod] | None
    events: list[PodEvent] | None


class CommandOutput(Output):
    """A command that would be run."""

    command: list[str]


class KubernetesObject(Output):
    """An object of Kubernetes."""

    kind: str
    name: str


class DeleteOutput(Output):
    """Objects of a job."""

    name: str
    objects: list[KubernetesObject]
    deleted: bool
    """false with `--dry-run`."""
