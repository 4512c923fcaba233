"""Outputs of commands on checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from hyperpod_ext.jobs.job_files.job_report import ErrorDetails, Output

from .base import Defect


class DamagedClaim(Output):
    """A damaged claim file, which should record the first step of a generation."""

    url: str
    generation: int
    message: str


class Checkpoint(Output):
    """One checkpoint in a durable tier."""

    step: int
    generation: int
    folder: str
    state: str
    """complete, unfinished, damaged, abandoned, uncertain or foreign."""
    detail: str
    ranks: int | None
    nbytes: int
    created_at: float | None
    kept: bool | None
    """Whether the tier's retention keeps the checkpoint; null if the job's policy is unknown."""


class TierCheckpoints(Output):
    """One durable tier."""

    tier: str
    url: str
    job: str | None
    error: ErrorDetails | None
    damaged_claims: list[DamagedClaim]
    checkpoints: list[Checkpoint]


class Snapshot(Output):
    """A snapshot in a node's memory."""

    rank: int
    step: int
    generation: int
    state: str
    replica: bool
    nbytes: int
    saved_at: float | None
    world_size: int | None


class MemoryNode(Output):
    """The memory of one node."""

    node: int
    error: str | None
    snapshots: list[Snapshot]
    copying: list[dict[str, Any]]
    """Counters of each tier that snapshots are copied to."""
    pieces: list[dict[str, Any]] = []
    """Parity pieces of other nodes' snapshots."""


class Memory(Output):
    """The memory tier of a running local job."""

    job: str
    nodes: list[MemoryNode]


class ListOutput(Output):
    """All checkpoints and snapshots of a job."""

    places: list[TierCheckpoints]
    memory: Memory | None


class RankFile(Output):
    """The files of one rank's image."""

    rank: int
    file: str
    frozen_file: str | None = None
    """File of the frozen parameters, the first bytes of the image; null: `file` has the whole image."""
    nbytes: int
    crc64nvme: str
    plan: str
    """Digest of the layout of the rank's state."""


class HeldTensors(Output):
    """Tensors of one object."""

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
    """Tensors of each object, by its name."""
    plain_values: int


class ShowOutput(Output):
    """The newest checkpoint of each place, or the checkpoint of `--step`."""

    checkpoints: list[ShownCheckpoint]


class VerifiedCheckpoint(Output):
    """A checkpoint of which every byte was read."""

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
    """Verified checkpoints."""

    checkpoints: list[VerifiedCheckpoint]
    damaged_claims: list[DamagedClaim]


class CopiedCheckpoint(Output):
    """A copied checkpoint."""

    step: int
    generation: int
    url: str
    new: bool
    """false if the destination had the checkpoint already."""
    files_copied: int
    files_already_there: int
    nbytes_copied: int


class CopyOutput(Output):
    """Copied checkpoints."""

    copied: list[CopiedCheckpoint]


class PrunedCheckpoint(Output):
    """A checkpoint that the retention policy does not keep."""

    url: str
    step: int
    generation: int
    state: str
    nbytes: int


class PruneOutput(Output):
    """Deleted checkpoints; with `--dry-run`, the checkpoints to delete."""

    deleted: list[PrunedCheckpoint]
    would_delete: list[PrunedCheckpoint]
