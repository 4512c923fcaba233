"""Model of a job's report, which report.json contains and `hp-ext report -o json` prints."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

_LONGEST_S = 1e12

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Number = FiniteFloat
Seconds = Annotated[float, Field(ge=-_LONGEST_S, le=_LONGEST_S)]
Share = Annotated[float, Field(ge=0, le=1)]
Losses = dict[Annotated[str, Field(pattern=r"^\d{1,18}$", description="Number of a step.")], Number | None]
"""One value per step, by the step's number."""


class Output(BaseModel):
    """An object that a command prints as JSON."""

    model_config = ConfigDict(extra="forbid")


class ProblemOutput(Output):
    """One mistake in the user's input."""

    message: str
    path: str
    """Dotted path of the field, `checkpoint.tiers.1.every_steps`. Empty if the mistake is not in a single field."""
    source: str
    """File or option that the value comes from."""
    line: int | None
    """Line in `source`, counted from 1."""
    hint: str
    """How to fix it."""
    rule: str
    """Id of the rule, for `hp-ext explain`. Empty if no rule found the mistake."""


class ErrorDetails(Output):
    """Why a command or a job failed."""

    code: str
    """Name of the error's class, `ConfigError`."""
    message: str
    hint: str
    """Recommended action."""
    exit_code: int | None = None
    """Exit code of the command."""
    problems: list[ProblemOutput] | None = None
    """All mistakes of a ConfigError."""


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
    """Step that the rank was in."""
    cause: str
    phase: str = ""
    kind: str = ""
    """Kind of the fault, as in docs/faults.md. Empty if unknown."""


class RecoveryReport(Output):
    """One recovery: from a fault to the first new step."""

    generation: Count
    t: Seconds | None = None
    """Seconds after the start of the job."""
    fault: FaultReport
    """The first fault of the recovery."""
    escalation_level: str = ""
    silent_s: Seconds | None = None
    """Seconds from the last sign of progress until the fault was detected."""
    resumed_step: Count
    """Step after which training continued."""
    steps_lost: Count
    source: str
    """Tier that the failed rank's state was restored from. Empty if nothing was restored."""
    survivor_pids_kept: bool
    """Whether every healthy rank kept its process."""
    phases: dict[str, Seconds | None]
    """Seconds of each phase, in order; null if the phase was not reached."""
    seconds: Seconds
    timeline: dict[str, list[tuple[str, Seconds, Seconds]]] = {}
    """Phases of each rank: name, start after `t`, duration."""


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
    """A period of steps with missing ranks."""

    first_step: Count
    last_step: Count
    ranks: Count
    of: Count
    pause_s: Seconds
    samples: str | None
    differs: str
    """Why the weights differ from the weights of a run without faults. Empty if they do not differ."""


class TierReport(Output):
    """Copies of one node in one tier."""

    tier: str
    node: Count
    newest_step: Count | None
    failed: Count
    skipped: Count
    last_error: str | None
    behind: list[tuple[Seconds, Count]]
    """Points of a chart: seconds after the start, and steps behind the newest step."""


class AdviceReport(Output):
    """A change that would have saved time."""

    rule: str
    text: str
    gain_s: Seconds
    gain_usd: Number | None = None


def _of_equal_length(shares: dict[str, list[float]]) -> dict[str, list[float]]:
    if len({len(each) for each in shares.values()}) > 1:
        raise ValueError("the lists of its phases have different lengths")
    return shares


class OverTime(Output):
    """Shares of phases in equal parts of the job."""

    part_s: Seconds
    """Length of one part in seconds."""
    shares: Annotated[dict[str, list[Share]], AfterValidator(_of_equal_length)]
    """Share of each phase in each part."""


class Restores(Output):
    """State that ranks restored from one source."""

    restores: Count
    bytes_moved: Count
    """Bytes that came from other nodes."""
    bytes_local: Count


class Snapshots(Output):
    """Counts and times of the ranks' snapshots."""

    count: Count
    mean_s: Seconds
    """Mean seconds that a rank waited for a snapshot."""


class Capacity(Output):
    """Nodes of the job."""

    nodes: Count
    spares: Count
    missing_node_s: Seconds
    """Node-seconds of lost nodes, plus those of all nodes while the job waited for a node."""


class DurableTier(Output):
    """A durable tier."""

    tier: str
    newest_step: Count | None


class Undisturbed(Output):
    """The run without faults that this run is compared with."""

    name: str | None = None
    state: str | None = None
    steps: Count
    goodput: Share
    seconds: Seconds | None
    losses: Losses = {}


class ReportOutput(Output):
    """Report of an ended job, from `hp-ext report` and in report.json of the run folder.

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
    """S3 object of the model that SageMaker stored."""
    starts: Count | None = None
    """Number of times that Slurm started the job."""
    state: str
    """succeeded, failed or cancelled."""
    error: ErrorDetails | None
    world_size: Count
    generations: Count
    steps: Count
    """Number of steps that the job made."""
    resumed_step: Count = 0
    """Step of an earlier run after which the job continued. 0 if it started with the first step."""
    resumed_from: str = ""
    """Checkpoint that the job continued from."""
    steps_lost: Count
    goodput: Share
    """Share of wall time that was spent on kept steps, 0 to 1."""
    seconds: dict[str, Seconds]
    """Wall time and its parts."""
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
    """Values logged for the whole run."""
    differs_by_rank: list[str] = []
    """Values that ranks logged differently."""
    weights: str
    """Digest of the final weights. Empty if the digest of any rank is unknown."""
    capacity: Capacity | None = None
    pids: dict[str, Count] = {}
    """Last process id of each rank."""
    phases: dict[str, dict[str, Seconds]] = {}
    """Seconds of each phase, by rank."""
    over_time: OverTime | None = None
    tiers: list[TierReport] = []
    traffic: dict[str, Restores] = {}
    """Restored state, by source."""
    snapshots: Snapshots | None = None
    durable: list[DurableTier] = []
    in_no_snapshot: list[str] = []
    """Objects that changed and are in no snapshot."""
    unseeded_loaders: list[str] = []
    """DataLoaders without their own generator."""
    warnings: list[str] = []
    loss_equal: bool | None = None
    """Whether losses are equal to the losses of the run without faults; null if not compared."""
    weights_equal: bool | None = None
    undisturbed: Undisturbed | None = None
    advice: list[AdviceReport] = []
