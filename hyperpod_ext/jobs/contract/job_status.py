"""Status of a submitted job (JobStatus), and its changes since the previous query (StatusUpdate)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job, as `hp-ext status` shows it."""

    name: str
    handle: str
    state: str
    """starting, running, comparing (the run without faults is running), succeeded, failed or cancelled."""
    step: int | None = None
    """Last completed step."""
    of: int | None = None
    """Number of steps of the job."""
    submitted_at: str = ""
    ended_at: str | None = None
    error: Mapping[str, Any] | None = None
    """Code, message and hint of a failed job."""
    folder: str = ""
    """Folder of the job's logs."""

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state in FINAL_STATES

    def to_json(self) -> dict[str, object]:
        """Return the status for scripts."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """Changes since the previous update. The last update of a job has a final status."""

    status: JobStatus
    events: tuple[Mapping[str, Any], ...] = ()
    """Events of the runtime: `event` is the kind, `run` is `main` or `undisturbed`."""
    lines: tuple[str, ...] = ()
    """Output of the workers, each line prefixed with its rank."""
