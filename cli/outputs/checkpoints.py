"""Models of the outputs of `hp-ext checkpoints` commands."""

from __future__ import annotations

from typing import Any, Literal

from hyperpod_ext.jobs.job_files.job_report import ErrorDetails, Output

from .base import Defect


class DamagedClaim(Output):
    """A damaged claim file. A claim file records the first step of a generation."""

    url: str
    generation: int
    message: str


class Checkpoint(Output):
    """One checkpoint in a durable tier."""

    step: int
    generation: int
    folder: str
    state: str
    """State of the checkpoint: complete, unfinished, damaged, abandoned (a later generation began before its step),
    uncertain (perhaps abandoned), or foreign (of another job, or of a newer version)."""
    detail: str
    ranks: int | None
    nbytes: int
    created_at: float | None
    kept: bool | None
    """Whether the tier's retention policy keeps the checkpoint; null if the policy is unknown."""


class TierCheckpoints(Output):
    """The checkpoints of a job in one durable tier."""

    tier: str
    url: str
    job: str | None
    error: ErrorDetails | None
    damaged_claims: list[DamagedClaim]
    checkpoints: list[Checkpoint]


class Snapshot(Output):
    """A snapshot in the memory of a node."""

    rank: int
    step: int
    generation: int
    state: str
    replica: bool
    nbytes: int
    saved_at: float | None
    world_size: int | None


class MemoryNode(Output):
    """The snapshots in the memory of one node."""

    node: int
    error: str | None
    snapshots: list[Snapshot]
    copying: list[dict[str, Any]]
    """Counters of copies, for each tier to which the node copies snapshots."""
    pieces: list[dict[str, Any]] = []
    """Parity pieces in the node's memory: XOR data of other nodes' snapshots."""


class Memory(Output):
    """The snapshots in the memory tier of a running local job."""

    job: str
    nodes: list[MemoryNode]


class ListOutput(Output):
    """All checkpoints and snapshots of a job."""

    places: list[TierCheckpoints]
    memory: Memory | None


class RankFile(Output):
    """The files that contain the state of one rank."""

    rank: int
    file: str
    frozen_file: str | None = None
    """File with the rank's frozen parameters, which are the first bytes of its state. If null, `file` contains the
    whole state."""
    nbytes: int
    crc64nvme: str
    plan: str
    """Digest of the layout of the rank's state."""


class HeldTensors(Output):
    """Numbers of tensors, elements and dtypes of one object in a checkpoint."""

    tensors: int
    elements: int
    dtypes: dict[str, int]


class ShownCheckpoint(Output):
    """Content of one checkpoint."""

    url: str
    job: str
    step: int
    generation: int
    state: str
    detail: str
    created_at: float | None
    world_size: int
    nbytes: int
    signature: Literal["good", "not checked"]
    ranks: list[RankFile]
    holds: dict[str, HeldTensors]
    """Tensors of each object, by the name of the object."""
    plain_values: int


class ShowOutput(Output):
    """Output of `hp-ext checkpoints show`: in each tier, the newest checkpoint or the checkpoint of `--step`."""

    checkpoints: list[ShownCheckpoint]


class VerifiedCheckpoint(Output):
    """Result for one verified checkpoint, of which every byte was read."""

    url: str
    step: int
    generation: int
    state: Literal["good", "damaged"]
    signature: Literal["checked", "not checked"]
    macs: Literal["none", "checked", "not checked"]
    files: int
    nbytes: int
    problems: list[Defect]


class VerifyOutput(Output):
    """Output of `hp-ext checkpoints verify`."""

    checkpoints: list[VerifiedCheckpoint]
    damaged_claims: list[DamagedClaim]


class CopiedCheckpoint(Output):
    """A checkpoint that was copied."""

    step: int
    generation: int
    url: str
    new: bool
    """Whether the checkpoint was copied; false if it existed in the destination already."""
    files_copied: int
    files_already_there: int
    nbytes_copied: int


class CopyOutput(Output):
    """Output of `hp-ext checkpoints copy`."""

    copied: list[CopiedCheckpoint]


class PrunedCheckpoint(Output):
    """A checkpoint that the retention policy does not keep."""

    url: str
    step: int
    generation: int
    state: str
    nbytes: int


class PruneOutput(Output):
    """Output of `hp-ext checkpoints prune`: deleted checkpoints, or with `--dry-run` the checkpoints that would be
    deleted."""

    deleted: list[PrunedCheckpoint]
    would_delete: list[PrunedCheckpoint]
