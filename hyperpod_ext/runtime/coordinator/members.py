"""Which nodes belong to the job, who of them is heard of, and whether that is enough. No messages, no clock."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.membership.quorum import may_go_on


@dataclass(slots=True, eq=False)
class Agent:
    """The coordinator's end of one agent's line."""

    writer: asyncio.StreamWriter
    heard_at: float
    events: int = 0
    """How many it has told on this line."""
    noted: int = 0
    """Number of the newest record that it has."""


@dataclass(slots=True)
class Roster:
    """Members of the job, under one coordinator."""

    node: int
    """Where the coordinator is."""
    members: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of each node: what it said of itself."""
    agents: dict[int, Agent] = field(default_factory=dict)
    """Lines that are open."""
    expected: dict[int, float] = field(default_factory=dict)
    """Members of an earlier coordinator that have not come to this one yet, and until when they may."""
    standing: list[set[int]] = field(default_factory=list)
    """Every membership that some member may go by: what all knew of last, and what was told since."""
    number: int = 0
    """Of the newest record."""

    def enter(self, node: int, hello: wire.Message, agent: Agent) -> None:
        """A node is there, for the first time or again."""
        keys = ("id", "pid", "door", "peer", "domain")
        self.members[node] = {key: hello[key] for key in keys}
        self.agents[node] = agent
        self.expected.pop(node, None)
        self.standing.append(set(self.members))

    def leave(self, node: int) -> bool:
        """A node is lost; whether the others are enough to go on without it."""
        self.agents.pop(node, None)
        self.expected.pop(node, None)
        reached = {*self.agents, *self.expected, self.node}
        enough = all(may_go_on(members, reached, self.node) for members in self.standing)
        self.members.pop(node, None)
        self.standing.append(set(self.members))
        return enough

    def forget(self, node: int) -> None:
        """A node is no member any more, though it is there still: it leaves once all others know."""
        self.members.pop(node, None)
        self.expected.pop(node, None)
        self.standing.append(set(self.members))

    def begin(self) -> None:
        """The job begins with the members that there are: nobody was told of those who were there before the rest."""
        self.standing = [set(self.members)]

    @property
    def is_agreed(self) -> bool:
        """Whether every member goes by the same membership."""
        return self.standing == [set(self.members)]

    def noted(self, node: int, number: int) -> None:
        """A node has the record with that number. What all have replaces what stood before."""
        if node in self.agents:
            self.agents[node].noted = number
        if not self.expected and all(agent.noted == self.number for agent in self.agents.values()):
            self.standing = [set(self.members)]

    def table(self, key: str) -> dict[int, Any]:
        """One thing that each member said of itself, by node."""
        return {node: member[key] for node, member in self.members.items()}
