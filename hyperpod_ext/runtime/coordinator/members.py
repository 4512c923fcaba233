"""Which nodes belong to the job, which of them are heard of, and whether that is enough. No messages, no clock."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.runtime.ipc.control_messages import AgentHandshake, NodeAssignment
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.membership.quorum import may_go_on, may_take_over

MOST_UNREAD_BYTES = 32 << 20
"""What may wait in memory for one agent to read it."""
_KNOWN = frozenset({"id", "pid", "address", "peer", "domain"})
"""What the job state has of each."""


@dataclass(slots=True, eq=False)
class Agent:
    """The coordinator's end of one agent's connection."""

    writer: asyncio.StreamWriter
    heard_at: float
    events: int = 0
    """How many it has told on this connection."""
    acknowledged: int = 0
    """Number of the newest job state that it has."""
    sent: int = 0
    """Number of the newest job state that it was sent; 0: none, or it is to be sent it whole."""
    knows_news: bool = False
    """Whether it was sent the newest news of the job."""
    assignment: NodeAssignment | None = None
    """What it was told that its node has."""
    is_there: asyncio.Event | None = None
    """Somebody waits to know whether it is there still: set once it is heard of, or lost."""

    def heard(self, now: float) -> None:
        """It has said something."""
        self.heard_at = now
        self.answer()

    def answer(self) -> None:
        """It is known whether it is there."""
        if self.is_there is not None:
            self.is_there.set()

    async def doubted(self) -> None:
        """Wait until it is known whether it is there."""
        if self.is_there is None or self.is_there.is_set():
            self.is_there = asyncio.Event()
        await self.is_there.wait()

    def hang_up(self) -> None:
        """Its connection counts no more."""
        self.answer()
        self.writer.close()

    def send(self, frame: bytes) -> None:
        """Write to it. The connection of one that does not read is cut, which is then as if its node were lost."""
        if self.writer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            self.writer.transport.abort()
        else:
            self.writer.write(frame)


@dataclass(slots=True)
class Members:
    """Members of the job, under one coordinator."""

    node: int
    """Where the coordinator is."""
    members: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of each node: what it said of itself."""
    agents: dict[int, Agent] = field(default_factory=dict)
    """Connections that are open."""
    expected: dict[int, float] = field(default_factory=dict)
    """Members that are not there and may come, and until when: those of an earlier coordinator, and doubted ones."""
    doubted: dict[int, str] = field(default_factory=dict)
    """Members whose loss is not counted yet, and what happened to them."""
    memberships: list[set[int]] = field(default_factory=list)
    """Every membership that some candidate may go by: what all knew of last, and what was told since."""
    has_begun: bool = True
    """Whether the job has: before that, nobody is told who its members are."""
    candidates: set[int] | None = None
    """Nodes whose agents have the job state; None: all."""
    version: int = 0
    """Rises when members change, or what they said of themselves."""
    number: int = 0
    """Of the newest job state."""
    lost_while_held: set[int] = field(default_factory=set)
    """Members before more of them were lost than the others may go on without, while no rank was to train."""
    gives_up: str = ""
    """Why the coordinator's own node cannot go on; empty: it can."""
    stepped_down: bool = False
    """Whether this coordinator speaks for the job no more."""
    unsure_since: float | None = None
    """When it became doubtful whether others have another coordinator, as this one had stood still or is to end the job
    for want of nodes; None: enough of them have shown since that they have not."""
    shown: set[int] = field(default_factory=set)
    """Nodes that have, since then."""

    def enter(self, node: int, handshake: AgentHandshake, agent: Agent) -> None:
        """A node is there, for the first time or again."""
        own = {key: value for key, value in encode(handshake).items() if key in _KNOWN}
        was_member = node in self.members
        if not was_member or not _is_same(own, self.members[node]):
            self.members[node] = own
            self.version += 1
        self.agents[node] = agent
        self._expect_no_more(node)
        if self.has_begun and (not was_member or self.is_agreed):
            self.memberships.append(set(self.members))

    def is_known(self, node: int, agent: str) -> bool:
        """Whether the agent with this id is the member `node`."""
        return node in self.members and self.members[node]["id"] == agent

    def doubt(self, node: int, cause: str, until: float) -> None:
        """A node is not there any more; it is lost if it does not come again until then."""
        self.agents.pop(node).answer()
        self.expected[node], self.doubted[node] = until, cause

    def _expect_no_more(self, node: int) -> None:
        self.expected.pop(node, None)
        self.doubted.pop(node, None)

    def leave(self, node: int) -> bool:
        """A node is lost; whether the others are enough to go on without it."""
        enough = self.enough_without({node})
        if (agent := self.agents.pop(node, None)) is not None:
            agent.answer()
        self._expect_no_more(node)
        self.members.pop(node, None)
        self.version += 1
        self.memberships.append(set(self.members))
        return enough

    def enough_without(self, nodes: Set[int]) -> bool:
        """Whether the others are enough to go on without these."""
        reached = ({*self.agents, *self.expected} - nodes) | {self.node}
        return all(may_go_on(members, reached, self.node) for members in self.memberships)

    def forget(self, node: int) -> None:
        """A node is no member any more, though it is there still: it leaves once all others know."""
        self.members.pop(node, None)
        self._expect_no_more(node)
        self.version += 1
        self.memberships.append(set(self.members))

    def released(self) -> set[int]:
        """Nodes that are there and no members any more, once every member knows."""
        return self.agents.keys() - self.members.keys() if self.is_agreed else set()

    def begin(self) -> None:
        """The job begins with the members that there are: nobody was told of those who were there before the rest."""
        self.has_begun, self.memberships = True, [set(self.members)]

    def succeed(
        self, members: dict[int, dict[str, Any]], lost: int, until: float, gone: Set[int] = frozenset()
    ) -> None:
        """Go on with the members of a coordinator that is lost; all but that one, and those that are `gone` for good,
        have until then to come."""
        self.members, self.memberships = members, [set(members) - gone]
        # who voted is as good as there; the others get their time
        self.expected = {node: until for node in members if node not in {self.node, lost, *gone}}

    @property
    def is_agreed(self) -> bool:
        """Whether every candidate goes by the same membership."""
        return self.memberships == [set(self.members)]

    def acknowledged(self, node: int, number: int) -> None:
        """A node has the job state with that number. What all candidates have replaces what stood before."""
        if node in self.agents:
            self.agents[node].acknowledged = number
        candidates = self.agents.keys() if self.candidates is None else self.candidates & self.agents.keys()
        if not self.expected and all(self.agents[its].acknowledged == self.number for its in candidates):
            self.memberships = [set(self.members)]

    def serves_peers(self, node: int, peer: tuple[str, int]) -> bool:
        """The memory server of `node` is another one; whether it is a member's."""
        if node not in self.members:
            return False
        self.members[node] = self.members[node] | {"peer": peer}
        self.version += 1
        return True

    def overdue(self, now: float, lease_s: float) -> dict[int, str]:
        """Members that must be given up, and why."""
        late = {
            node: self.doubted.get(node, "it did not come to the new coordinator")
            for node, until in self.expected.items()
            if now > until
        }
        for node, agent in self.agents.items():
            if now - agent.heard_at > lease_s / 2 and node != self.node:
                late[node] = f"its agent was silent for {now - agent.heard_at:.1f} s"
        return late

    def silent(self, now: float, lease_s: float) -> set[int]:
        """Nodes that missed more than a heartbeat: they may be lost, and it is too early to say."""
        return {node for node, agent in self.agents.items() if now - agent.heard_at > lease_s / 3 and node != self.node}

    def was_paused(self, now: float, lease_s: float) -> None:
        """This process did not run: what came meanwhile has not been read yet."""
        for agent in self.agents.values():
            agent.heard_at = max(agent.heard_at, now - lease_s / 4)

    @property
    def others_may_go_on(self) -> bool:
        """Whether the other members are enough for another coordinator."""
        return may_take_over(set(self.members), self.members.keys() - {self.node})

    def doubt_all(self, now: float) -> None:
        """Others may have another coordinator: nothing counts until enough of them show that they have none."""
        self.unsure_since = now
        self.shown.clear()

    def follows(self, node: int, sent_at: float) -> None:
        """A node has said something to this coordinator, at that moment of the clock here."""
        if self.unsure_since is None or sent_at < self.unsure_since:
            return
        self.shown.add(node)
        if all(may_go_on(members, self.shown, self.node) for members in self.memberships):
            self.unsure_since = None

    def table(self, key: str) -> dict[int, Any]:
        """One thing that each member said of itself, by node."""
        return {node: member[key] for node, member in self.members.items()}


def _is_same(own: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether a node says of itself what is known; of another coordinator, addresses come as lists."""
    return {key: _listed(value) for key, value in own.items()} == {key: _listed(value) for key, value in known.items()}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
