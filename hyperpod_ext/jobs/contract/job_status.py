"""What is known of a submitted job, now (JobStatus) and since one last looked (Moment)."""

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
    """starting, running, comparing (the undisturbed run goes on), succeeded, failed or cancelled."""
    step: int | None = None
    """Last step that was made."""
    of: int | None = None
    """Steps the job will make."""
    submitted_at: str = ""
    ended_at: str | None = None
    error: Mapping[str, Any] | None = None
    """Of a failed job: code, message, hint."""
    folder: str = ""
    """Where its logs are."""

    @property
    def ended(self) -> bool:
        """Nothing will change any more."""
        return self.state in FINAL_STATES

    def to_json(self) -> dict[str, object]:
        """The status as scripts read it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """What happened since the moment before; the last of a job has a final status."""

    status: JobStatus
    events: tuple[Mapping[str, Any], ...] = ()
    """As the runtime wrote them: `event` says which, `run` whether `main` or `undisturbed`."""
    lines: tuple[str, ...] = ()
    """What the workers printed, each line with its rank before it."""
