"""The objects that all parts of a job's coordinator share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from hyperpod_ext.runtime.coordinator.job_run import Formation, JobRun, Ranks
from hyperpod_ext.runtime.coordinator.members import Members
from hyperpod_ext.runtime.coordinator.outbox import Outbox
from hyperpod_ext.runtime.coordinator.save_schedule import SaveSchedule
from hyperpod_ext.runtime.events.log import EventLog
from hyperpod_ext.runtime.membership.membership import Membership


@dataclass(frozen=True, slots=True)
class JobContext:
    """The objects that all parts of one coordinator share."""

    run: JobRun
    members: Members
    membership: Membership
    events: EventLog
    schedule: SaveSchedule
    outbox: Outbox
    formation: Formation
    ranks: Ranks

    @classmethod
    def of(
        cls, run: JobRun, members: Members, membership: Membership, inherited: Mapping[str, Any] | None, now: float
    ) -> Self:
        """Create the shared objects of a new coordinator. `inherited`: job state of the former coordinator; None for
        the first coordinator of a job."""
        events = EventLog(run.run_dir, fresh=run.term == 1)
        schedule = SaveSchedule(run.config, events.write, now, (inherited or {}).get("learned", {}))
        outbox = Outbox(run, members, membership, inherited, schedule.tuner.learned)
        formation = Formation(run.config.restart.form_timeout_s, now if run.term > 1 else None)
        return cls(run, members, membership, events, schedule, outbox, formation, Ranks())
