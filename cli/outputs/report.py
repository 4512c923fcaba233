"""The report of a job, of `hp-ext report` and in report.json."""

from __future__ import annotations

from .base import Count, ErrorDetails, Number, Output, Seconds, Share


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
    """Steps that were made while ranks were missing."""

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


class OverTime(Output):
    """Where the time went, over equal parts of the job."""

    part_s: Seconds
    """Seconds of one part."""
    shares: dict[str, list[Number]]
    """By phase: its share of each part, 0 to 1."""


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
    losses: dict[str, Number | None] = {}


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
    seconds: dict[str, Seconds | None]
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
    losses: dict[str, Number | None]
    """By step."""
    metrics: dict[str, Number | None] = {}
    """Values logged for the whole run."""
    differs_by_rank: list[str] = []
    """Values that ranks logged differently."""
    weights: str
    """Digest of the final weights; empty: not known of every rank."""
    capacity: dict[str, Number] = {}
    pids: dict[str, Count] = {}
    """Process id of each rank, the last one."""
    phases: dict[str, dict[str, Seconds]] = {}
    """By rank: seconds of each phase."""
    over_time: OverTime | None = None
    tiers: list[TierReport] = []
    traffic: dict[str, dict[str, Count]] = {}
    """Bytes that ranks restored, by source."""
    snapshots: dict[str, Number] = {}
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
