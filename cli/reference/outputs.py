"""Models of the outputs under `-o json`, and the schema of the event log. `hp-ext schema` publishes them.

Later versions may add fields; a field keeps its name and meaning.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

Number = int | float
Seconds = float


class Output(BaseModel):
    """An object that a command prints."""

    model_config = ConfigDict(extra="forbid")


class ProblemOutput(Output):
    """One mistake in what the user wrote."""

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


class ErrorOutput(Output):
    """Printed by every command that fails under `-o json`."""

    error: ErrorDetails


class StatusOutput(Output):
    """One job, of `hp-ext status` and `hp-ext list`."""

    name: str
    handle: str
    """The job's URL, `local:///tiny-gpt`."""
    state: str
    """starting, running, comparing, succeeded, failed or cancelled."""
    step: int | None
    """Newest step that was made."""
    of: int | None
    """Steps that the job will make."""
    submitted_at: str
    ended_at: str | None
    error: ErrorDetails | None
    folder: str
    """Folder of its logs."""


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
    """A running job, of `hp-ext top --once`."""

    name: str | None = None
    handle: str | None = None
    state: str
    step: int | None
    of: int | None
    loss: Number | None
    step_s: Seconds | None
    """The slowest rank's newest step."""
    left_s: Seconds | None
    """Estimated seconds until the last step."""
    goodput: float | None
    """Share of all ranks' time that went into kept steps, 0 to 1."""
    world_size: int | None
    nodes: int | None
    generation: int
    faults: int
    recoveries: int
    steps_lost: int
    nodes_lost: int
    seconds: dict[str, Seconds]
    """Seconds of all ranks together, by phase."""
    tiers: dict[str, TierNow]
    ranks: list[RankNow]


class FaultReport(Output):
    """One fault."""

    t: Seconds | None = None
    """Seconds after the start of the job."""
    rank: int
    node: int
    step: int
    """The step that the rank was making."""
    cause: str
    phase: str = ""
    kind: str = ""
    """As in docs/faults.md; empty: unknown."""


class RecoveryReport(Output):
    """One recovery: from a fault to the first new step."""

    generation: int
    t: Seconds | None = None
    """Seconds after the start of the job."""
    fault: FaultReport
    """The first fault."""
    escalation_level: str = ""
    silent_s: Seconds | None = None
    """From the last sign of progress until the fault was seen."""
    resumed_step: int
    """Training continued after this step."""
    steps_lost: int
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

    of: int
    nodes: int
    world_size: int
    generation: int
    step: int
    cause: str
    pause_s: Seconds
    """Seconds without a step."""
    pids_kept: bool
    local_share: float
    phases: dict[str, Seconds]
    bytes_moved: int
    bytes_local: int
    sources: list[str]


class ContinuedReport(Output):
    """Steps that were made while ranks were missing."""

    first_step: int
    last_step: int
    ranks: int
    of: int
    pause_s: Seconds
    samples: str | None
    differs: str
    """How weights differ from those of an undisturbed run; empty: not at all."""


class TierReport(Output):
    """Copies of one node in one tier."""

    tier: str
    node: int
    newest_step: int | None
    failed: int
    skipped: int
    last_error: str | None
    behind: list[tuple[Seconds, int]]
    """Seconds after the start, and steps behind the newest one."""


class AdviceReport(Output):
    """A change that would have saved time."""

    rule: str
    text: str
    gain_s: Seconds
    gain_usd: float | None = None


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
    starts: int | None = None
    """How often Slurm has started the job."""
    state: str
    """succeeded, failed or cancelled."""
    error: ErrorDetails | None
    world_size: int
    generations: int
    steps: int
    """Steps that the job made."""
    resumed_step: int = 0
    """The job continued after this step of an earlier run; 0: it started at the first step."""
    resumed_from: str = ""
    """Checkpoint that it continued from."""
    steps_lost: int
    goodput: float
    """Share of wall time that went into kept steps, 0 to 1."""
    seconds: dict[str, Seconds]
    """Wall time and its parts."""
    recoveries: list[RecoveryReport]
    resizes: list[ResizeReport] = []
    continued: list[ContinuedReport] = []
    network: dict[str, dict[str, str]] = {}
    """By node: interface and address."""
    nodes_lost: list[int] = []
    spares: list[int] = []
    faults: list[FaultReport] = []
    skipped: list[int] = []
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
    pids: dict[str, int] = {}
    """Process id of each rank, the last one."""
    phases: dict[str, dict[str, Seconds]] = {}
    """By rank: seconds of each phase."""
    over_time: dict[str, Any] = {}
    """`part_s`, and by phase the share of each part of the job."""
    tiers: list[TierReport] = []
    traffic: dict[str, dict[str, int]] = {}
    """Bytes that ranks restored, by source."""
    snapshots: dict[str, Number] = {}
    durable: list[dict[str, Any]] = []
    """Newest step of each durable tier."""
    in_no_snapshot: list[str] = []
    """Objects that changed and are in no snapshot."""
    unseeded_loaders: list[str] = []
    """DataLoaders without a generator of their own."""
    warnings: list[str] = []
    loss_equal: bool | None = None
    """Losses are equal to those of the undisturbed run; null: not compared."""
    weights_equal: bool | None = None
    undisturbed: dict[str, Any] | None = None
    advice: list[AdviceReport] = []


OUTPUTS: dict[str, type[Output]] = {
    "error": ErrorOutput,
    "report": ReportOutput,
    "status": StatusOutput,
    "top": TopOutput,
}
"""Models of outputs by the name that `hp-ext schema` takes."""


def event_schema() -> dict[str, Any]:
    """JSON schema of one line of events.jsonl: one of the declared kinds."""
    from hyperpod_ext.config.files.field_docs import description
    from hyperpod_ext.runtime.events.kinds import THEMES, declared_in

    definitions: dict[str, Any] = {}
    names = []
    for kind in (kind for theme in THEMES for kind in declared_in(theme)):
        schema = kind.model_json_schema()
        definitions |= schema.pop("$defs", {})
        for name, field in schema["properties"].items():
            if text := description(kind, name):
                field["description"] = text
        schema["required"] = sorted({*schema.get("required", ()), "event"})
        definitions[kind.__name__] = schema
        names.append(kind.__name__)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Event"}
    return head | {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": definitions}
