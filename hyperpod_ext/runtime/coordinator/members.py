"""The members of a job, their connections, and whether enough are reachable. Sends no messages and reads no clock."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.runtime.ipc.control_messages import AgentHandshake, NodeAssignment
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.membership.quorum import may_go_on, may_take_over

MOST_UNREAD_BYTES = 32 << 20
"""Most bytes that may wait in memory until one agent reads them."""
_KNOWN = frozenset({"id", "pid", "address", "peer", "domain"})
"""Fields of a member's handshake that go into the job state."""


@dataclass(slots=True, eq=False)
class Agent:
    """The coordinator's end of the connection to one agent."""

    writer: asyncio.StreamWriter
    heard_at: float
    """When the agent's last message arrived."""
    events: int = 0
    """Number of events received on this connection."""
    acknowledged: int = 0
    """Number of the newest job state that the agent has acknowledged."""
    sent: int = 0
    """Number of the newest job state that was sent to the agent. 0 if the agent must get the full job state next."""
    has_news: bool = False
    """Whether the newest job news was sent to the agent."""
    assignment: NodeAssignment | None = None
    """The node assignment that was sent to the agent last."""
    is_confirmed: asyncio.Event | None = None
    """Set once the agent has sent a message or is lost. None while no caller waits for that."""

    def heard(self, now: float) -> None:
        """Record that a message of the agent has arrived."""
        self.heard_at = now
        self.confirm()

    def confirm(self) -> None:
        """Wake the callers of `confirmed`, because the agent has sent a message or is lost."""
        if self.is_confirmed is not None:
            self.is_confirmed.set()

    async def confirmed(self) -> None:
        """Wait until the agent sends a message or is lost."""
        if self.is_confirmed is None or self.is_confirmed.is_set():
            self.is_confirmed = asyncio.Event()
        await self.is_confirmed.wait()

    def hang_up(self) -> None:
        """Close the connection, because a newer connection replaces it."""
        self.confirm()
        self.writer.close()

    def send(self, frame: bytes) -> None:
        """Send a message. If the agent has stopped reading, abort the connection, as if the agent's node were lost."""
        if self.writer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            self.writer.transport.abort()
        else:
            self.writer.write(frame)


@dataclass(slots=True)
class Members:
    """The members of a job as one coordinator knows them."""

    node: int
    """Node of this coordinator."""
    members: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Fields of each member's handshake, by node."""
    agents: dict[int, Agent] = field(default_factory=dict)
    """Open connections to agents, by node."""
    expected: dict[int, float] = field(default_factory=dict)
    """Members without a connection, and the time until which they may connect. Such members come from an earlier
    coordinator, or are doubted."""
    doubted: dict[int, str] = field(default_factory=dict)
    """Members that are probably lost but not counted as lost yet, with the cause for each."""
    memberships: list[set[int]] = field(default_factory=list)
    """Every membership that some candidate may have: the last one that all candidates acknowledged, and all later
    ones."""
    has_begun: bool = True
    """Whether the job has begun. Before the job begins, no agent has received a membership."""
    candidates: set[int] | None = None
    """Nodes whose agents have the job state; None if all have it."""
    version: int = 0
    """Number that increases with each change of the members or their fields."""
    number: int = 0
    """Number of the newest job state."""
    lost_while_held: set[int] = field(default_factory=set)
    """The members before a majority was lost while training was held; empty if that did not happen."""
    gives_up: str = ""
    """Why the coordinator's own node cannot continue; empty if it can."""
    stepped_down: bool = False
    """Whether this coordinator no longer coordinates the job."""
    unsure_since: float | None = None
    """Since when the other nodes may have another coordinator, because this process was paused or would end the job for
    lack of nodes. None once enough nodes have sent a message to this coordinator since then."""
    shown: set[int] = field(default_factory=set)
    """Nodes that have sent a message to this coordinator after `unsure_since`."""

    def enter(self, node: int, handshake: AgentHandshake, agent: Agent) -> None:
        """Add a node that has connected for the first time or again."""
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
        """Return whether the agent with this id is the member `node`."""
        return node in self.members and self.members[node]["id"] == agent

    def doubt(self, node: int, cause: str, until: float) -> None:
        """Record that a node's connection has ended. The node counts as lost unless it connects again before
        `until`."""
        self.agents.pop(node).confirm()
        self.expected[node], self.doubted[node] = until, cause

    def _expect_no_more(self, node: int) -> None:
        self.expected.pop(node, None)
        self.doubted.pop(node, None)

    def leave(self, node: int) -> bool:
        """Remove a lost node. Returns whether enough nodes remain to continue without it."""
        enough = self.enough_without({node})
        if (agent := self.agents.pop(node, None)) is not None:
            agent.confirm()
        self._expect_no_more(node)
        self.members.pop(node, None)
        self.version += 1
        self.memberships.append(set(self.members))
        return enough

    def enough_without(self, nodes: Set[int]) -> bool:
        """Return whether enough nodes are reachable to continue without `nodes`."""
        reached = ({*self.agents, *self.expected} - nodes) | {self.node}
        return all(may_go_on(members, reached, self.node) for members in self.memberships)

    def forget(self, node: int) -> None:
        """Remove a node that leaves the job. The node stays connected until all members have the new membership."""
        self.members.pop(node, None)
        self._expect_no_more(node)
        self.version += 1
        self.memberships.append(set(self.members))

    def released(self) -> set[int]:
        """Return the connected nodes that are no longer members, once every candidate has the new membership."""
        return self.agents.keys() - self.members.keys() if self.is_agreed else set()

    def begin(self) -> None:
        """Begin the job with the present members. No agent has received an earlier membership."""
        self.has_begun, self.memberships = True, [set(self.members)]

    def succeed(
        self, members: dict[int, dict[str, Any]], lost: int, until: float, gone: Set[int] = frozenset()
    ) -> None:
        """Take over the members of a lost coordinator.

        Args:
            lost: node of the lost coordinator.
            until: time until which the other members may connect to this coordinator.
            gone: nodes that will not return to the job.
        """
        self.members, self.memberships = members, [set(members) - gone]
        self.expected = {node: until for node in members if node not in {self.node, lost, *gone}}

    @property
    def is_agreed(self) -> bool:
        """Whether every candidate has acknowledged the current membership."""
        return self.memberships == [set(self.members)]

    def acknowledged(self, node: int, number: int) -> None:
        """Record that a node has the job state `number`. Once all candidates have the newest job state, only the newest
        membership counts."""
        if node in self.agents:
            self.agents[node].acknowledged = number
        candidates = self.agents.keys() if self.candidates is None else self.candidates & self.agents.keys()
        if not self.expected and all(self.agents[each].acknowledged == self.number for each in candidates):
            self.memberships = [set(self.members)]

    def serves_peers(self, node: int, peer: tuple[str, int]) -> bool:
        """Set the address of a new memory server on `node`. Returns whether the node is a member."""
        if node not in self.members:
            return False
        self.members[node] = self.members[node] | {"peer": peer}
        self.version += 1
        return True

    def overdue(self, now: float, lease_s: float) -> dict[int, str]:
        """Return the members that now count as lost, with the cause for each."""
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
        """Return the nodes that have missed more than one heartbeat, and may be lost but do not count as lost yet."""
        return {node for node, agent in self.agents.items() if now - agent.heard_at > lease_s / 3 and node != self.node}

    def was_paused(self, now: float, lease_s: float) -> None:
        """Count all agents as recently heard after a pause of this process, because their messages are still unread."""
        for agent in self.agents.values():
            agent.heard_at = max(agent.heard_at, now - lease_s / 4)

    @property
    def others_may_go_on(self) -> bool:
        """Whether the other members suffice to elect another coordinator."""
        return may_take_over(set(self.members), self.members.keys() - {self.node})

    def doubt_all(self, now: float) -> None:
        """Assume that the other nodes may have another coordinator, until enough of them send a message to this one."""
        self.unsure_since = now
        self.shown.clear()

    def follows(self, node: int, sent_at: float) -> None:
        """Record that a node sent a message to this coordinator at `sent_at`, a time on this machine's clock."""
        if self.unsure_since is None or sent_at < self.unsure_since:
            return
        self.shown.add(node)
        if all(may_go_on(members, self.shown, self.node) for members in self.memberships):
            self.unsure_since = None

    def table(self, key: str) -> dict[int, Any]:
        """Return one field of each member's handshake, by node."""
        return {node: member[key] for node, member in self.members.items()}


def _is_same(own: dict[str, Any], known: dict[str, Any]) -> bool:
    """Return whether a handshake has the known fields. In another coordinator's job state, addresses are lists instead
    of tuples."""
    return {key: _listed(value) for key, value in own.items()} == {key: _listed(value) for key, value in known.items()}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
