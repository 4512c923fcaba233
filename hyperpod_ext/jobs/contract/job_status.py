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
    """`starting`, `running`, `comparing`, `succeeded`, `failed` or `cancelled`.

    A job is `comparing` while a second run without faults is running, for comparison with the run with faults.
    """
    step: int | None = None
    """Last completed step of training; None if no step has completed."""
    of: int | None = None
    """Total number of training steps of the job; None if unknown."""
    submitted_at: str = ""
    ended_at: str | None = None
    error: Mapping[str, Any] | None = None
    """Code, message and hint of the error of a failed job; None for other jobs."""
    folder: str = ""
    """Folder of the job's logs."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended: succeeded, failed or cancelled."""
        return self.state in FINAL_STATES

    def to_json(self) -> dict[str, object]:
        """Return the status as a dictionary, for `-o json`."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """A job's status, and its new events and log lines since the previous update.

    The last update of a job has a final status.
    """

    status: JobStatus
    events: tuple[Mapping[str, Any], ...] = ()
    """New events of the runtime. In each event, `event` is its kind, and `run` names the run that wrote it, `main` or
    `undisturbed` (the comparison run without faults)."""
    lines: tuple[str, ...] = ()
    """Output of the workers, each line prefixed with its rank."""
