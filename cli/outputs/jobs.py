"""Models of the outputs of commands for jobs."""

from __future__ import annotations

from typing import Any, Literal

from hyperpod_ext.jobs.job_files.job_report import ErrorDetails, Number, Output, ReportOutput, Seconds


class StatusOutput(Output):
    """One job."""

    name: str
    handle: str
    """URL of the job, such as `local:///tiny-gpt`."""
    state: str
    """State of the job: starting, running, comparing, succeeded, failed or cancelled."""
    step: int | None
    """Number of the newest finished step; null if unknown."""
    of: int | None
    """Number of steps in the whole job; null if unknown."""
    submitted_at: str
    ended_at: str | None
    error: ErrorDetails | None
    folder: str
    """Folder with the job's logs. Empty if the logs are not on this machine."""


class RankNow(Output):
    """The present state of one rank, in the output of `hp-ext top`."""

    rank: int
    node: int | None
    phase: str
    step: int | None
    step_s: Seconds | None


class TierNow(Output):
    """The present state of one tier, in the output of `hp-ext top`."""

    newest_step: int | None


class TopOutput(Output):
    """Output of `hp-ext top`: the present state of a job."""

    name: str | None = None
    handle: str | None = None
    state: str
    step: int | None
    of: int | None
    loss: Number | None
    step_s: Seconds | None
    """Seconds that the slowest rank took for its newest finished step."""
    left_s: Seconds | None
    """Estimated seconds until the job's last step is finished."""
    goodput: float | None
    """Share of all ranks' time that was spent on steps that were kept, from 0 to 1."""
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
    """The files that would be submitted for a job."""

    target: str
    name: str
    world_size: int
    nodes: int
    workers_per_node: int
    warnings: list[str]
    files: dict[str, str]
    """Text of each file, by the name of the file."""


class WrittenFiles(Output):
    """Files that `hp-ext render --out` wrote."""

    written: list[str]


class Accepted(Output):
    """Output of `--server-dry-run` for a job that the target's server would accept."""

    name: str
    target: str
    accepted: Literal[True]


class Submitted(Output):
    """A submitted job."""

    name: str
    target: str
    handle: str
    """URL of the job."""


class EndedOutput(Output):
    """Result of an ended job whose report is not on this machine."""

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
    """A job's spec that was converted from a file of another tool."""

    target: str
    job: dict[str, Any]
    """The job's spec. The schema of the spec is the output of `hp-ext schema`."""
    left_out: list[str]
    """Parts of the file that the spec cannot express."""
    notes: list[str]


class ImportedFile(Output):
    """Result for one file in an imported folder."""

    file: str
    outcome: Literal["carried", "named", "refused"]
    """`carried`: the file was converted completely. `named`: converted except for the parts in `left_out`. `refused`:
    not converted."""
    target: str | None
    job: dict[str, Any] | None
    left_out: list[str]
    notes: list[str]
    problems: list[str]


class ImportedFolder(Output):
    """Results for all files in an imported folder."""

    files: int
    carried: int
    named: int
    refused: int
    results: list[ImportedFile]


class OrderedResize(Output):
    """Output of `hp-ext resize --no-wait`: a request that was sent."""

    order: str
    nodes: int


class OrderedMove(Output):
    """Output of `hp-ext move --no-wait`: a request that was sent."""

    order: str
    node: str


class ResizeOutput(Output):
    """Output of `hp-ext resize`: a resize that is done. A field that has a default in this class is absent from the
    output if the target does not report the field."""

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
    """Number of the last step before the resize."""
    pause_s: Seconds | None = None
    """Seconds during which the job trained no step because of the resize."""
    pids_kept: bool | None = None
    local_share: float | None = None
    """Share of the training state that did not have to move to another node, from 0 to 1."""
    full_size: int | None = None
    samples: str = ""
    given_back: list[str] = []
    """Nodes that were returned to Slurm."""
    kept: list[str] = []
    """Nodes that have left the job, but stay in the job's Slurm allocation."""
    why_kept: str = ""


class MoveOutput(ResizeOutput):
    """Output of `hp-ext move`: a node whose ranks moved to a spare node."""

    node: int
    to: int | None
    """Number of the node that has the ranks now; null if the job continues without the node."""
    drain: str = ""
    """Name of the node in Slurm, if Slurm drains the node."""
    why_no_drain: str = ""


class ChaosOutput(Output):
    """Output of `hp-ext chaos`: a fault that was requested."""

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
    """Why the pod does not run; null if it runs."""


class PodEvent(Output):
    """An event of a job or of its pods."""

    at: str | None
    type: str | None
    reason: str | None
    object: str
    count: int
    message: str | None


class DescribeOutput(StatusOutput):
    """Output of `hp-ext describe`. Conditions, pods and events are null if the target has no pods."""

    conditions: list[Condition] | None
    pods: list[Pod] | None
    events: list[PodEvent] | None


class CommandOutput(Output):
    """Output of `--dry-run`: the command that would be run, as a list of words."""

    command: list[str]


class KubernetesObject(Output):
    """A Kubernetes object of a job."""

    kind: str
    name: str


class DeleteOutput(Output):
    """Output of `hp-ext delete`: the Kubernetes objects of a job."""

    name: str
    objects: list[KubernetesObject]
    deleted: bool
    """Whether the objects were deleted; false with `--dry-run`."""
