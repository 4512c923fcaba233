"""Model of a job's report, which report.json holds and `hp-ext report -o json` prints."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

_LONGEST_S = 1e12

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Number = FiniteFloat
Seconds = Annotated[float, Field(ge=-_LONGEST_S, le=_LONGEST_S)]
Share = Annotated[float, Field(ge=0, le=1)]
Losses = dict[Annotated[str, Field(pattern=r"^\d{1,18}$", description="Number of a step.")], Number | None]
"""By step."""


class Output(BaseModel):
    """An object that a command prints."""

    model_config = ConfigDict(extra="forbid")


class ProblemOutput(Output):
    """One mistake in the user's input."""

    message: str
    path: str
    """Dotted path of the field, `checkpoint.tiers.1.every_steps`; empty: no single field."""
    source: str
    """File or option that the value comes from."""
    line: int | None
    """Line in `source`, from 1."""
    hint: str
    """How to fix it."""
    rule: str
    """`hp-ext explain RULE` explains it; empty: no rule."""


class ErrorDetails(Output):
    """Why a command or a job failed."""

    code: str
    """Name of the error's class, `ConfigError`."""
    message: str
    hint: str
    """The next thing to do."""
    exit_code: int | None = None
    """Exit code of the command."""
    problems: list[ProblemOutput] | None = None
    """Every mistake, for a ConfigError."""


class StatusFile(Output):
    """status.json of a local job."""

    name: str
    state: str
    submitted_at: str
    error: ErrorDetails | None
    ended_at: str | None = None
    scratch: str | None = None


class SlurmRecord(Output):
    """Record of a job that this machine has submitted to Slurm."""

    id: str
    cluster: str
    folder: str
    runs: str
    world_size: Count
    submitted_at: str


class TrainingJobRecord(Output):
    """Record of a training job that this machine has created at SageMaker."""

    job_name: str
    region: str


class FaultReport(Output):
    """One fault."""

    t: Seconds | None = None
    """Seconds after the start of the job."""
    rank: Count
    node: Count
    step: Count
    """The step that the rank was making."""
    cause: str
    phase: str = ""
    kind: str = ""
    """As in docs/faults.md; empty: unknown."""


class RecoveryReport(Output):
    """One recovery: from a fault to the first new step."""

    generation: Count
    t: Seconds | None = None
    """Seconds after the start of the job."""
    fault: FaultReport
    """The first fault."""
    escalation_level: str = ""
    silent_s: Seconds | None = None
    """From the last sign of progress until the fault was seen."""
    resumed_step: Count
    """Training continued after this step."""
    steps_lost: Count
    source: str
    """Tier that the failed rank's state came from; empty: nothing was restored."""
    survivor_pids_kept: bool
    """Every healthy rank kept its process."""
    phases: dict[str, Seconds | None]
    """Seconds of each phase, in order; null: not reached."""
    seconds: Seconds
    timeline: dict[str, list[tuple[str, Seconds, Seconds]]] = {}
    """By rank: phase, beginning after `t`, duration."""


class ResizeReport(Output):
    """One change of the number of nodes."""

    of: Count
    nodes: Count
    world_size: Count
    generation: Count
    step: Count
    cause: str
    pause_s: Seconds
    """Seconds without a step."""
    pids_kept: bool
    local_share: Share
    phases: dict[str, Seconds]
    bytes_moved: Count
    bytes_local: Count
    sources: list[str]


class ContinuedReport(Output):
    """Steps made while ranks were missing."""

    first_step: Count
    last_step: Count
    ranks: Count
    of: Count
    pause_s: Seconds
    samples: str | None
    differs: str
    """How weights differ from those of an undisturbed run; empty: not at all."""


class TierReport(Output):
    """Copies of one node in one tier."""

    tier: str
    node: Count
    newest_step: Count | None
    failed: Count
    skipped: Count
    last_error: str | None
    behind: list[tuple[Seconds, Count]]
    """Seconds after the start, and steps behind the newest one."""


class AdviceReport(Output):
    """A change that would have saved time."""

    rule: str
    text: str
    gain_s: Seconds
    gain_usd: Number | None = None


def _of_equal_length(shares: dict[str, list[float]]) -> dict[str, list[float]]:
    if len({len(each) for each in shares.values()}) > 1:
        raise ValueError("its phases have lists of different lengths")
    return shares


class OverTime(Output):
    """Shares of phases in equal parts of the job."""

    part_s: Seconds
    """Seconds of one part."""
    shares: Annotated[dict[str, list[Share]], AfterValidator(_of_equal_length)]
    """By phase: its share of each part."""


class Restores(Output):
    """State that ranks restored from one source."""

    restores: Count
    bytes_moved: Count
    """Bytes from other nodes."""
    bytes_local: Count


class Snapshots(Output):
    """Snapshots that ranks made."""

    count: Count
    mean_s: Seconds
    """Seconds that a rank waited for one."""


class Capacity(Output):
    """Nodes of the job."""

    nodes: Count
    spares: Count
    missing_node_s: Seconds
    """Node-seconds of lost nodes, and of all nodes while they waited for another one."""


class DurableTier(Output):
    """A durable tier."""

    tier: str
    newest_step: Count | None


class Undisturbed(Output):
    """The run that this one is compared with."""

    name: str | None = None
    state: str | None = None
    steps: Count
    goodput: Share
    seconds: Seconds | None
    losses: Losses = {}


class ReportOutput(Output):
    """A job that has ended, of `hp-ext report`; report.json in the run folder, too.

    Reports of earlier versions lack the fields that have a default.
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
    """S3 object of the model that SageMaker kept."""
    starts: Count | None = None
    """How often Slurm has started the job."""
    state: str
    """succeeded, failed or cancelled."""
    error: ErrorDetails | None
    world_size: Count
    generations: Count
    steps: Count
    """Steps that the job made."""
    resumed_step: Count = 0
    """The job continued after this step of an earlier run; 0: it started at the first step."""
    resumed_from: str = ""
    """Checkpoint that it continued from."""
    steps_lost: Count
    goodput: Share
    """Share of wall time that went into kept steps, 0 to 1."""
    seconds: dict[str, Seconds]
    """Wall time and its parts."""
    recoveries: list[RecoveryReport]
    resizes: list[ResizeReport] = []
    continued: list[ContinuedReport] = []
    network: dict[str, dict[str, str]] = {}
    """By node: interface and address."""
    nodes_lost: list[Count] = []
    spares: list[Count] = []
    faults: list[FaultReport] = []
    skipped: list[Count] = []
    """Steps left out by the NaN guard."""
    losses: Losses
    metrics: dict[str, Number | None] = {}
    """Values logged for the whole run."""
    differs_by_rank: list[str] = []
    """Values that ranks logged differently."""
    weights: str
    """Digest of the final weights; empty: not known of every rank."""
    capacity: Capacity | None = None
    pids: dict[str, Count] = {}
    """Process id of each rank, the last one."""
    phases: dict[str, dict[str, Seconds]] = {}
    """By rank: seconds of each phase."""
    over_time: OverTime | None = None
    tiers: list[TierReport] = []
    traffic: dict[str, Restores] = {}
    """By source."""
    snapshots: Snapshots | None = None
    durable: list[DurableTier] = []
    in_no_snapshot: list[str] = []
    """Objects that changed and are in no snapshot."""
    unseeded_loaders: list[str] = []
    """DataLoaders without a generator of their own."""
    warnings: list[str] = []
    loss_equal: bool | None = None
    """Losses are equal to those of the undisturbed run; null: not compared."""
    weights_equal: bool | None = None
    undisturbed: Undisturbed | None = None
    advice: list[AdviceReport] = []
