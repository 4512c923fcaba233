"""One run of the job, as its coordinator knows it. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ext.config.job.runtime import RuntimeConfig


@dataclass(frozen=True, slots=True)
class JobRun:
    """What stays the same under one coordinator."""

    config: RuntimeConfig
    node: int
    """Where the coordinator is."""
    run_dir: Path
    """Where events.jsonl and report.json go."""
    master_port: int
    """Free port for scripts that open process groups on their own."""
    name: str
    """Names this run of the job."""
    term: int = 1
    """Rises with each coordinator."""


@dataclass(slots=True)
class Ranks:
    """What ranks have reported in this generation."""

    steps: dict[int, int] = field(default_factory=dict)
    """Newest step that each has committed."""
    stores: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Where each serves its keys, as it said when it joined."""

    def newest(self, default: int) -> int:
        """Newest step that any rank has committed."""
        return max(self.steps.values(), default=default)

    def committed_by_all(self, world_size: int) -> int | None:
        """Newest step that every rank has committed; None: some rank has not reported any."""
        return min(self.steps.values()) if len(self.steps) == world_size else None


@dataclass(slots=True)
class Formation:
    """Since when a generation forms. One that takes too long is a fault of the ranks that are missing."""

    limit_s: float
    since: float | None = None
    """None: not all nodes that the job begins with have come."""

    @property
    def job_has_begun(self) -> bool:
        return self.since is not None

    def begins(self, now: float) -> None:
        self.since = now

    def is_late(self, now: float) -> bool:
        """Whether the time is over; it begins anew then."""
        if self.since is None or now - self.since < self.limit_s:
            return False
        self.since = now
        return True
