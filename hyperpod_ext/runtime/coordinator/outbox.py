"""Messages from the coordinator to agents."""

from __future__ import annotations

from typing import Any

from hyperpod_ext.runtime.coordinator.job_run import JobRun
from hyperpod_ext.runtime.coordinator.members import Members
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.membership.membership import Membership


class Outbox:
    """Sends to one agent, to all, or through all to their workers."""

    def __init__(self, run: JobRun, members: Members, membership: Membership) -> None:
        self._run, self._members, self._membership = run, members, membership

    def send(self, node: int, message: wire.Message) -> None:
        """To one agent; one that is not there yet hears what it must when it comes."""
        if (agent := self._members.agents.get(node)) is not None:
            agent.writer.write(wire.encode(message))

    def to_agents(self, message: wire.Message) -> None:
        for node in list(self._members.agents):
            self.send(node, message)

    def to_workers(self, kind: str, **fields: Any) -> None:
        """To all agents, for their workers of this generation."""
        self.to_agents({"type": kind, "generation": self._membership.generation, **fields})

    def share_record(self) -> None:
        """To every agent: all that another coordinator needs."""
        self._members.number += 1
        record = {
            "term": self._run.term,
            "number": self._members.number,
            "coordinator": self._run.node,
            "members": self._members.members,
            "master_port": self._run.master_port,
            "run": self._run.name,
            "membership": self._membership.to_json(),
        }
        self.to_agents({"type": "record", "record": record})
