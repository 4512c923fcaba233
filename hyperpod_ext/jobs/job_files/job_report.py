"""Models of a job's report (report.json, also printed by `hp-ext report -o json`) and of small records of jobs."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

_LONGEST_S = 1e12

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Number = FiniteFloat
Seconds = Annotated[float, Field(ge=-_LONGEST_S, le=_LONGEST_S)]
Share = Annotated[float, Field(ge=0, le=1)]
Losses = dict[Annotated[str, Field(pattern=r"^\d{1,18}$", description="Number of a step.")], Number | None]
"""Loss of each step, by the step's number; None if the loss is not a finite number."""


class Output(BaseModel):
    """An object that a command prints as JSON."""

    model_config = ConfigDict(extra="forbid")


class ProblemOutput(Output):
    """One mistake in the user's input."""

    message: str
    path: str
    """Dotted path of the wrong field, such as `checkpoint.tiers.1.every_steps`; empty if no single field is wrong."""
    source: str
    """File or option that contains the mistake."""
    line: int | None
    """Line of the mistake in `source`, counted from 1."""
    hint: str
    """How to fix the mistake."""
    rule: str
    """Id of the rule that found the mistake, for `hp-ext explain`; empty if the mistake was found otherwise."""


class ErrorDetails(Output):
    """The error of a failed command or job."""

    code: str
    """Name of the error's class, such as `ConfigError`."""
    message: str
    hint: str
    """Recommended action."""
    exit_code: int | None = None
    """Exit code of the failed command."""
    problems: list[ProblemOutput] | None = None
    """All mistakes that a ConfigError reports; None for other errors."""


class StatusFile(Output):
    """Content of status.json of a local job."""

    name: str
    state: str
    submitted_at: str
    error: ErrorDetails | None
    ended_at: str | None = None
    scratch: str | None = None


class SlurmRecord(Output):
    """Record of a job that this machine submitted to Slurm, stored on this machine."""

    id: str
    cluster: str
    folder: str
    runs: str
    world_size: Count
    submitted_at: str


class TrainingJobRecord(Output):
    """Record of a training job that this machine created at SageMaker, stored on this machine."""

    job_name: str
    region: str


class FaultReport(Output):
    """One fault of a rank or node of the job."""

    t: Seconds | None = None
    """Seconds after the start of the job."""
    rank: Count
    node: Count
    step: Count
    """Step in which the rank was when the fault occurred."""
    cause: str
    phase: str = ""
    kind: str = ""
    """Kind of the fault, one of the kinds in docs/faults.md; empty if unknown."""


class RecoveryReport(Output):
    """One recovery, from a fault until the first step that was completed after it."""

    generation: Count
    t: Seconds | None = None
    """Seconds after the start of the job."""
    fault: FaultReport
    """The first fault of the recovery."""
    failed: list[Count] = []
    """Ranks that failed, at most 8, in the order in which the faults were detected."""
    escalation_level: str = ""
    silent_s: Seconds | None = None
    """Seconds from the job's last sign of progress (a step begun or completed by any rank) until the fault was
    detected; null if there was no progress before the fault."""
    resumed_step: Count
    """Last completed step after which training continued."""
    steps_lost: Count
    source: str
    """Tier from which the failed rank's state was restored; empty if no state was restored."""
    survivor_pids_kept: bool
    """Whether every healthy rank kept its process."""
    phases: dict[str, Seconds | None]
    """Duration of each phase of the recovery in seconds, in order; null if the phase was not reached."""
    seconds: Seconds
    timeline: dict[str, list[tuple[str, Seconds, Seconds]]] = {}
    """Phases of each rank during the recovery: name, start in seconds after `t`, and duration in seconds."""


class ResizeReport(Output):
    """One change of the job's number of nodes."""

    of: Count
    nodes: Count
    world_size: Count
    generation: Count
    step: Count
    cause: str
    pause_s: Seconds
    """Seconds between the last step before the resize and the first step after it."""
    pids_kept: bool
    local_share: Share
    phases: dict[str, Seconds]
    bytes_moved: Count
    bytes_local: Count
    sources: list[str]


class ContinuedReport(Output):
    """A period of steps during which the job trained without its lost ranks."""

    first_step: Count
    last_step: Count
    ranks: Count
    of: Count
    pause_s: Seconds
    samples: str | None
    differs: str
    """Reason why the final weights differ from the weights of a run without faults; empty if they do not differ."""


class TierReport(Output):
    """Copies of one node's snapshots in one tier."""

    tier: str
    node: Count
    newest_step: Count | None
    failed: Count
    skipped: Count
    last_error: str | None
    behind: list[tuple[Seconds, Count]]
    """Points of a chart over time: seconds after the job's start, and steps by which the newest copy in the tier is
    older than the newest step."""


class AdviceReport(Output):
    """Advice: a change of the spec or cluster that would have saved time."""

    rule: str
    text: str
    gain_s: Seconds
    gain_usd: Number | None = None


def _of_equal_length(shares: dict[str, list[float]]) -> dict[str, list[float]]:
    if len({len(each) for each in shares.values()}) > 1:
        raise ValueError("the lists of its phases have different lengths")
    return shares


class OverTime(Output):
    """Share of each phase in the job's time, over the course of the job. The job's time is divided into equal parts."""

    part_s: Seconds
    """Length of one part of the job's time in seconds."""
    shares: Annotated[dict[str, list[Share]], AfterValidator(_of_equal_length)]
    """Share of each phase (0 to 1) in each part of the job's time."""


class Restores(Output):
    """State that ranks restored from one source, such as a tier."""

    restores: Count
    bytes_moved: Count
    """Bytes of state that came from other nodes."""
    bytes_local: Count


class Snapshots(Output):
    """Number and duration of the snapshots of all ranks."""

    count: Count
    mean_s: Seconds
    """Mean seconds that a rank waited for a snapshot."""


class Capacity(Output):
    """Numbers of nodes and spares of the job, and time lost because nodes were missing."""

    nodes: Count
    spares: Count
    missing_node_s: Seconds
    """Node-seconds for which lost nodes were missing, plus the node-seconds of all nodes while the job waited for a
    node."""


class DurableTier(Output):
    """A durable tier, and the newest step that is complete in it."""

    tier: str
    newest_step: Count | None


class Undisturbed(Output):
    """The run without faults with which this run is compared."""

    name: str | None = None
    state: str | None = None
    steps: Count
    goodput: Share
    seconds: Seconds | None
    losses: Losses = {}


class ReportOutput(Output):
    """Report of a job: the output of `hp-ext report -o json`, and the content of report.json in the run folder.

    Reports of earlier versions may lack fields that have a default.
    """

    name: str | None = None
    target: str | None = None
    handle: str | None = None
    slurm_job_id: str | None = None
    submitted_at: str = ""
    ended_at: str | None = None
    training_job: str | None = None
    """Name of the training job at SageMaker."""
    model: str | None = None
    """URI of the S3 object in which SageMaker stored the model."""
    starts: Count | None = None
    """Number of times that Slurm has started the job."""
    state: str
    """succeeded, failed or cancelled."""
    error: ErrorDetails | None
    world_size: Count
    generations: Count
    steps: Count
    """Number of the last completed step."""
    resumed_step: Count = 0
    """Step of an earlier run after which this job continued. 0 if this job started with the first step."""
    resumed_from: str = ""
    """Checkpoint from which the job continued; empty if the job started with the first step."""
    steps_lost: Count
    goodput: Share
    """Share of wall time (0 to 1) that was spent on steps whose work was kept."""
    seconds: dict[str, Seconds]
    """Wall time of the job and its parts, in seconds."""
    recoveries: list[RecoveryReport]
    resizes: list[ResizeReport] = []
    continued: list[ContinuedReport] = []
    network: dict[str, dict[str, str]] = {}
    """Interface and address of each node."""
    nodes_lost: list[Count] = []
    spares: list[Count] = []
    faults: list[FaultReport] = []
    skipped: list[Count] = []
    """Steps that the NaN guard skipped."""
    losses: Losses
    metrics: dict[str, Number | None] = {}
    """Values that the script logged for the whole run, without a step."""
    differs_by_rank: list[str] = []
    """Names of logged values that differ between ranks."""
    weights: str
    """Digest of the final weights; empty if the digest of any rank is unknown."""
    capacity: Capacity | None = None
    pids: dict[str, Count] = {}
    """Process id of the newest process of each rank."""
    phases: dict[str, dict[str, Seconds]] = {}
    """Seconds that each rank spent in each phase, by rank."""
    over_time: OverTime | None = None
    tiers: list[TierReport] = []
    traffic: dict[str, Restores] = {}
    """State that ranks restored, by source."""
    snapshots: Snapshots | None = None
    durable: list[DurableTier] = []
    in_no_snapshot: list[str] = []
    """Names of objects that changed during training but are in no snapshot."""
    unseeded_loaders: list[str] = []
    """Names of DataLoaders without their own random generator, which may draw other random numbers after a fault."""
    warnings: list[str] = []
    loss_equal: bool | None = None
    """Whether all losses are equal to the losses of the run without faults; null if not compared."""
    weights_equal: bool | None = None
    undisturbed: Undisturbed | None = None
    advice: list[AdviceReport] = []
