"""The members of a job (its nodes), the connections to their agents, and whether enough of them are reachable. The
classes of this module create no messages and do not read the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.runtime.ipc.control_messages import AgentHandshake, NodeAssignment
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.membership.quorum import may_go_on, may_take_over

MOST_UNREAD_BYTES = 32 << 20
"""Maximum number of bytes in memory that wait until one agent reads them."""
_KNOWN = frozenset({"id", "pid", "address", "peer", "domain"})
"""Fields of an agent's handshake that become part of the job state."""


@dataclass(slots=True, eq=False)
class Agent:
    """The connection to one agent, and what was sent to that agent."""

    writer: asyncio.StreamWriter
    heard_at: float
    """Time at which the agent's last message arrived, on the monotonic clock."""
    events: int = 0
    """Number of events that were received on this connection."""
    acknowledged: int = 0
    """Version number of the newest job state that the agent has acknowledged."""
    sent: int = 0
    """Version number of the newest job state that was sent to the agent. 0 if the agent must receive the full job state
    next."""
    has_news: bool = False
    """Whether the newest `JobNews` message was sent to the agent."""
    assignment: NodeAssignment | None = None
    """The last `NodeAssignment` message that was sent to the agent."""
    is_confirmed: asyncio.Event | None = None
    """Event that is set once the agent has sent a message or is lost; None until `confirmed` is called."""

    def heard(self, now: float) -> None:
        """Record that a message of the agent has arrived at time `now`."""
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
        """Close the connection, because the agent has opened a newer connection."""
        self.confirm()
        self.writer.close()

    def send(self, frame: bytes) -> None:
        """Send a message. If the agent has stopped reading, abort the connection instead, as if the agent's node were
        lost."""
        if self.writer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            self.writer.transport.abort()
        else:
            self.writer.write(frame)


@dataclass(slots=True)
class Members:
    """The members of a job from the view of one coordinator."""

    node: int
    """Number of this coordinator's own node."""
    members: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Maps the node number of each member to fields of its agent's handshake."""
    agents: dict[int, Agent] = field(default_factory=dict)
    """Maps the node number of each connected agent to its connection."""
    expected: dict[int, float] = field(default_factory=dict)
    """Maps each disconnected member to the time until which it may connect. The member is in `doubted`, or has not yet
    connected to this new coordinator."""
    doubted: dict[int, str] = field(default_factory=dict)
    """Maps each member that is probably lost, but not treated as lost yet, to the cause of the probable loss."""
    memberships: list[set[int]] = field(default_factory=list)
    """Every set of members that some candidate (an agent that may become coordinator) may know: the last set that all
    candidates have acknowledged, and all later sets."""
    has_begun: bool = True
    """Whether the job has begun. Before the job begins, no agent has received a set of members."""
    candidates: set[int] | None = None
    """Nodes whose agents have a copy of the job state; None if all agents have one."""
    version: int = 0
    """Counter that increases with each change of `members`."""
    number: int = 0
    """Version number of the newest job state."""
    lost_while_held: set[int] = field(default_factory=set)
    """If a majority was lost while training was on hold, the members before that loss; empty otherwise."""
    gives_up: str = ""
    """Reason why the coordinator's own node cannot continue; empty if it can."""
    stepped_down: bool = False
    """Whether this coordinator has stopped coordinating the job."""
    unsure_since: float | None = None
    """Time since which the other nodes may have another coordinator. `unsure_since` is set if this process was paused,
    or if it would end the job for lack of nodes. `unsure_since` is None if it is sure that no other coordinator
    exists."""
    shown: set[int] = field(default_factory=set)
    """Nodes that have sent a message to this coordinator after `unsure_since`."""

    def enter(self, node: int, handshake: AgentHandshake, agent: Agent) -> None:
        """Add a node whose agent has connected, for the first time or again."""
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
        """Return whether the agent process with the id `agent` is the agent of member `node`."""
        return node in self.members and self.members[node]["id"] == agent

    def doubt(self, node: int, cause: str, until: float) -> None:
        """Record that the connection to `node` has ended. The node is treated as lost unless it connects again before
        the time `until`."""
        self.agents.pop(node).confirm()
        self.expected[node], self.doubted[node] = until, cause

    def _expect_no_more(self, node: int) -> None:
        self.expected.pop(node, None)
        self.doubted.pop(node, None)

    def leave(self, node: int) -> bool:
        """Remove a lost node. Returns whether the reachable nodes are enough to continue without the lost node."""
        enough = self.enough_without({node})
        if (agent := self.agents.pop(node, None)) is not None:
            agent.confirm()
        self._expect_no_more(node)
        self.members.pop(node, None)
        self.version += 1
        self.memberships.append(set(self.members))
        return enough

    def enough_without(self, nodes: Set[int]) -> bool:
        """Return whether the reachable nodes are enough to continue without `nodes`."""
        reached = ({*self.agents, *self.expected} - nodes) | {self.node}
        return all(may_go_on(members, reached, self.node) for members in self.memberships)

    def forget(self, node: int) -> None:
        """Remove a node that leaves the job, but stays connected until all agents that may become coordinator know the
        new set of members."""
        self.members.pop(node, None)
        self._expect_no_more(node)
        self.version += 1
        self.memberships.append(set(self.members))

    def released(self) -> set[int]:
        """Return the connected nodes that are no longer members. The result is empty until all agents that may become
        coordinator have acknowledged the new set of members."""
        return self.agents.keys() - self.members.keys() if self.is_agreed else set()

    def begin(self) -> None:
        """Begin the job with the current members. No agent has received an earlier set of members."""
        self.has_begun, self.memberships = True, [set(self.members)]

    def succeed(
        self, members: dict[int, dict[str, Any]], lost: int, until: float, gone: Set[int] = frozenset()
    ) -> None:
        """Take over the members of a lost coordinator, whose job state had `members`.

        Args:
            lost: node number of the lost coordinator.
            until: time until which the other members may connect to this coordinator.
            gone: nodes that will not return to the job.
        """
        self.members, self.memberships = members, [set(members) - gone]
        self.expected = {node: until for node in members if node not in {self.node, lost, *gone}}

    @property
    def is_agreed(self) -> bool:
        """Whether all agents that may become coordinator have acknowledged the current set of members."""
        return self.memberships == [set(self.members)]

    def acknowledged(self, node: int, number: int) -> None:
        """Record that `node` has version `number` of the job state. Once all agents that may become coordinator have
        the newest version, majorities are counted only among the newest set of members."""
        if node in self.agents:
            self.agents[node].acknowledged = number
        candidates = self.agents.keys() if self.candidates is None else self.candidates & self.agents.keys()
        if not self.expected and all(self.agents[each].acknowledged == self.number for each in candidates):
            self.memberships = [set(self.members)]

    def serves_peers(self, node: int, peer: tuple[str, int]) -> bool:
        """Set the address of a new memory server on `node`. Do nothing and return False if the node is not a member."""
        if node not in self.members:
            return False
        self.members[node] = self.members[node] | {"peer": peer}
        self.version += 1
        return True

    def overdue(self, now: float, lease_s: float) -> dict[int, str]:
        """Return a map from each member that must now be treated as lost to the cause of its loss."""
        late = {
            node: self.doubted.get(node, "it did not connect to the new coordinator")
            for node, until in self.expected.items()
            if now > until
        }
        for node, agent in self.agents.items():
            if now - agent.heard_at > lease_s / 2 and node != self.node:
                late[node] = f"its agent was silent for {now - agent.heard_at:.1f} s"
        return late

    def silent(self, now: float, lease_s: float) -> set[int]:
        """Return the nodes that have missed more than one heartbeat, but are not treated as lost yet."""
        return {node for node, agent in self.agents.items() if now - agent.heard_at > lease_s / 3 and node != self.node}

    def was_paused(self, now: float, lease_s: float) -> None:
        """After a pause of this process, treat all agents as if they had just sent a message, because their messages
        are still unread."""
        for agent in self.agents.values():
            agent.heard_at = max(agent.heard_at, now - lease_s / 4)

    @property
    def others_may_go_on(self) -> bool:
        """Whether the other members are enough to elect another coordinator without this node."""
        return may_take_over(set(self.members), self.members.keys() - {self.node})

    def doubt_all(self, now: float) -> None:
        """Assume that the other nodes may have another coordinator, until enough of them have sent a message to this
        coordinator."""
        self.unsure_since = now
        self.shown.clear()

    def follows(self, node: int, sent_at: float) -> None:
        """Record that `node` still follows this coordinator. `sent_at`: time at which the node sent its message, on
        this machine's clock."""
        if self.unsure_since is None or sent_at < self.unsure_since:
            return
        self.shown.add(node)
        if all(may_go_on(members, self.shown, self.node) for members in self.memberships):
            self.unsure_since = None

    def table(self, key: str) -> dict[int, Any]:
        """Return a map from the node number of each member to the handshake field `key`."""
        return {node: member[key] for node, member in self.members.items()}


def _is_same(own: dict[str, Any], known: dict[str, Any]) -> bool:
    """Return whether the fields of a new handshake (`own`) are equal to the stored fields (`known`). Addresses that
    come from another coordinator's job state are lists instead of tuples."""
    return {key: _listed(value) for key, value in own.items()} == {key: _listed(value) for key, value in known.items()}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
