"""Messages from the coordinator to agents."""

from __future__ import annotations

from hyperpod_ext.runtime.coordinator.job_run import JobRun
from hyperpod_ext.runtime.coordinator.members import Members
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.membership.membership import Membership


class Outbox:
    """Sends to one agent, to all, or through all to their workers."""

    def __init__(self, run: JobRun, members: Members, membership: Membership) -> None:
        self._run, self._members, self._membership = run, members, membership

    def send(self, node: int, order: c.ToAgent) -> None:
        """To one agent; one that is not there yet hears what it must when it comes."""
        if (agent := self._members.agents.get(node)) is not None:
            agent.writer.write(frame_of(order))

    def to_all(self, order: c.ToAgent) -> None:
        """To every agent; orders of a generation are for their workers."""
        frame = frame_of(order)
        for agent in self._members.agents.values():
            agent.writer.write(frame)

    def share_job_state(self) -> None:
        """To every agent: all that another coordinator needs."""
        self._members.number += 1
        job_state = {
            "term": self._run.term,
            "number": self._members.number,
            "coordinator": self._run.node,
            "members": self._members.members,
            "master_port": self._run.master_port,
            "run": self._run.name,
            "membership": self._membership.to_json(),
        }
        self.to_all(c.JobState(job_state=job_state))


def frame_of(order: c.ToAgent) -> bytes:
    """What goes over the wire."""
    return wire.encode(encode(order))
