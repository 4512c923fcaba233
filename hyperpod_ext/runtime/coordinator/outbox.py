"""Sends the coordinator's messages to agents, and tracks what each agent has received.

Candidates (the few agents of which one replaces a lost coordinator) receive the full job state once, and after that
only its changes. Every agent receives a `JobNews` message and its own `NodeAssignment` message whenever their content
has changed. A message to several agents is encoded once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hyperpod_ext.runtime.coordinator.job_run import JobRun
from hyperpod_ext.runtime.coordinator.members import Agent, Members
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.decision_parts import DecisionParts
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.membership.candidates import CANDIDATES, choose_candidates
from hyperpod_ext.runtime.membership.job_state_changes import chained, changes
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.membership.node_states import NodeState
from hyperpod_ext.runtime.membership.parity_groups import Group, place_groups
from hyperpod_ext.runtime.membership.placement import Placement, place_replicas

MakeOrder = Callable[[c.RestoreDecision, dict[int, tuple[str, int]]], c.BeginGeneration | c.TryNext]
"""Function that creates an order from one part of a restore decision, and from the addresses of the memory servers that
this part names."""
_FEW = CANDIDATES + 1
"""Maximum number of agents in a job in which every agent may become coordinator."""
_NO_RANKS = c.NodeAssignment(ranks=(), peers={}, domains={})


class Outbox:
    """Sends messages to one agent or to all agents. Orders for workers are sent to their agents, which pass them on.

    Args:
        inherited: job state of the former coordinator; None for the first coordinator.
        learned: function that returns the state of the interval tuner, which is part of the job state.
    """

    def __init__(
        self,
        run: JobRun,
        members: Members,
        membership: Membership,
        inherited: Mapping[str, Any] | None = None,
        learned: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._run, self._members, self._membership, self._learned = run, members, membership, learned
        before = inherited or {}
        self._job_state: dict[str, Any] = {}
        """The job state that was last sent to agents that may become coordinator."""
        self._digest = ""
        self._news: c.JobNews | None = None
        self._shares_soon = False
        self._assignments: dict[int, c.NodeAssignment] = {}
        """Maps each node with ranks to its current `NodeAssignment`."""
        self._assigned_for: tuple[object, ...] = ()
        self._placement: Placement = {
            int(node): tuple(holders) for node, holders in before.get("placement", {}).items()
        }
        self._groups: tuple[Group, ...] = tuple(tuple(group) for group in before.get("parity_groups", ()))
        """Parity groups: groups of nodes that store parity of each other's snapshots."""
        self._servers: dict[int, Any] = {}
        """Maps each node with ranks to the address of its memory server."""
        # count the former coordinator's memory server as lost, unless its node left the job normally and is no longer a
        # member
        was_lost = str(before.get("coordinator")) in before.get("members", {})
        self._servers_lost = int(before.get("servers_lost", 0)) + was_lost

    def send(self, node: int, order: c.ToAgent) -> None:
        """Send an order to the agent of `node` if it is connected. An agent that is not connected receives the orders
        that it missed when it connects."""
        if (agent := self._members.agents.get(node)) is not None:
            agent.send(frame_of(order))

    def to_all(self, order: c.ToAgent) -> None:
        """Send an order to every connected agent."""
        self._to(self._members.agents, frame_of(order))

    def _to(self, nodes: Iterable[int], frame: bytes) -> None:
        for node in nodes:
            self._members.agents[node].send(frame)

    def to_each(self, order: MakeOrder, decision: DecisionParts) -> None:
        """Send to every agent an order with the part of the restore decision that its ranks need. Agents that need the
        same part get the same message, which is encoded once."""
        for part, nodes in decision.parts(self._members.agents):
            sources = (source for several in part.sources.values() for source in several)
            named = {source.node for source in sources if source.kind != "memory"} & self._members.members.keys()
            peers = {node: tuple(self._members.members[node]["peer"]) for node in sorted(named)}
            self._to(nodes, frame_of(order(part, peers)))

    # --- the job state ----------------------------------------------------------------------------

    def share_with(self, node: int) -> None:
        """Send `JobNews` and `NodeAssignment` to a node that has connected again, and changes of the job state to the
        candidates (agents that may become coordinator).

        In a large job, the job state is created at once only if the node's agent may become coordinator. For other
        agents, the job state is created a moment later, once for all that connect at about the same time, because the
        cost of creating it grows with the number of nodes.
        """
        members = self._members
        if self._news is None or len(members.agents) <= _FEW or node in (members.candidates or ()):
            self.share_job_state()
            return
        self._assign()
        agent = members.agents[node]
        agent.send(frame_of(self._news))
        agent.has_news = True
        self._share_assignment(node, agent)
        if not self._shares_soon:
            self._shares_soon = True
            asyncio.get_running_loop().call_soon(self._share_now)

    def _share_now(self) -> None:
        if self._shares_soon and not self._members.stepped_down:
            self.share_job_state()

    def share_job_state(self) -> None:
        """Send changes of the job state to candidates, and changed `JobNews` and `NodeAssignment` to all agents."""
        self._shares_soon = False
        members = self._members
        self._assign()
        domains = {node: member["domain"] for node, member in members.members.items() if node in members.agents}
        members.candidates = choose_candidates(members.candidates or set(), domains, self._run.node)
        self._share_state_with(members.candidates & members.agents.keys())
        self._share_news()
        self._share_assignments()

    def _share_state_with(self, candidates: set[int]) -> None:
        before, after = self._job_state, self._make_job_state()
        made = changes(before, after)
        if made:
            self._members.number += 1
            self._job_state = after
        number, digest = self._members.number, chained(self._digest, made) if made else self._digest
        sent = {node: self._members.agents[node].sent for node in candidates}
        late = {node for node in candidates if sent[node] == 0 or sent[node] != number - bool(made)}
        if made and candidates - late:
            change = c.JobStateChange(number=number, before=self._digest, digest=digest, changes=tuple(made))
            self._to(candidates - late, frame_of(change))
        if late:
            self._to(late, frame_of(c.JobState(job_state=self._job_state | {"number": number}, digest=digest)))
        self._digest = digest
        for node in candidates:
            self._members.agents[node].sent = number

    def _make_job_state(self) -> dict[str, Any]:
        return {
            "term": self._run.term,
            "coordinator": self._run.node,
            "members": {str(node): member for node, member in self._members.members.items()},
            "master_port": self._run.master_port,
            "run": self._run.name,
            "membership": self._membership.to_json(),
            "placement": {str(node): list(holders) for node, holders in self._placement.items()},
            **({"parity_groups": [list(group) for group in self._groups]} if self._groups else {}),
            "servers_lost": self._servers_lost,
            **({"gives_up": self._members.gives_up} if self._members.gives_up else {}),
            "learned": self._learned(),
        }

    def share_again(self, node: int) -> None:
        """Send the full job state to the agent of `node`, which lacks the version to which a change applies."""
        if (agent := self._members.agents.get(node)) is not None:
            agent.sent = 0
            self.share_job_state()

    # --- news and assignments ---------------------------------------------------------------------

    def _share_news(self) -> None:
        news = self._make_news()
        late = [agent for agent in self._members.agents.values() if not agent.has_news]
        if news != self._news:
            late = list(self._members.agents.values())
        frame = frame_of(news) if late else b""
        for agent in late:
            agent.send(frame)
            agent.has_news = True
        self._news = news

    def _make_news(self) -> c.JobNews:
        membership, members = self._membership, self._members.members
        rehearsing = self._run.config.chaos is not None
        faults = [(fault.rank, fault.step) for fault in membership.faults if fault.rank >= 0 and fault.step >= 0]
        return c.JobNews(
            term=self._run.term,
            coordinator=self._run.node,
            candidates={node: tuple(members[node]["address"]) for node in sorted(self._members.candidates or ())},
            members=len(members),
            master_port=self._run.master_port,
            world_size=len(membership.nodes),
            nodes=len(self._servers),
            moved_in=membership.renumbering.newest,
            spares=bool(membership.states.those(NodeState.SPARE, NodeState.JOINING)),
            servers_lost=self._servers_lost,
            faults=tuple(dict.fromkeys(faults)) if rehearsing else (),
        )

    def _share_assignments(self) -> None:
        for node, agent in self._members.agents.items():
            self._share_assignment(node, agent)

    def _share_assignment(self, node: int, agent: Agent) -> None:
        assignment = self._assignments.get(node, _NO_RANKS)
        if agent.assignment is not assignment and agent.assignment != assignment:
            agent.send(frame_of(assignment))
        agent.assignment = assignment

    def _assign(self) -> None:
        """Compute the `NodeAssignment` of each node: its ranks, and the holders of its snapshots' copies or parity."""
        ranks_by, members = self._membership.nodes, self._members
        if self._assigned_for and self._assigned_for[0] is ranks_by and self._assigned_for[1] == members.version:
            return
        self._assigned_for = ranks_by, members.version
        ranks: dict[int, list[int]] = {}
        for rank, node in ranks_by.items():
            ranks.setdefault(node, []).append(rank)
        servers = {node: tuple(members.members[node]["peer"]) for node in ranks if node in members.members}
        self._servers_lost += sum(1 for node, server in self._servers.items() if servers.get(node) != server)
        self._servers = servers
        domains = {node: str(members.members[node]["domain"]) for node in servers}
        tier = self._run.config.checkpoint.peer()
        groups: dict[int, Group] = {}
        if tier is not None and tier.parity is not None:
            if len(servers) == len(ranks):
                # parity groups can be placed only if the failure domain of every node is known
                self._groups = place_groups(domains, tier.parity, self._groups)
            complete = [group for group in self._groups if set(group) <= servers.keys()]
            groups = {node: group for group in complete for node in group}
        elif tier is not None and servers:
            self._placement = place_replicas(domains, tier.replicas, self._placement)
        self._assignments = {}
        for node, its in ranks.items():
            others = groups.get(node, ()) or self._placement.get(node, ())
            near = [each for each in dict.fromkeys((node, *others)) if node in servers and each in servers]
            self._assignments[node] = c.NodeAssignment(
                ranks=tuple(sorted(its)),
                peers={each: servers[each] for each in near},
                domains={each: domains[each] for each in near},
                group={each: tuple(sorted(ranks[each])) for each in groups.get(node, ())},
            )


def frame_of(order: c.ToAgent) -> bytes:
    """Encode an order as a frame for the wire."""
    return wire.encode(encode(order))
