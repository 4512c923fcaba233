"""Decides which agents the coordinator accepts, and sends the first messages to an accepted agent."""

from __future__ import annotations

import time

from hyperpod_ext.runtime.coordinator.actions import Actions
from hyperpod_ext.runtime.coordinator.job_context import JobContext
from hyperpod_ext.runtime.coordinator.members import Agent
from hyperpod_ext.runtime.coordinator.outbox import frame_of
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.declared import Address
from hyperpod_ext.runtime.membership.actions import JobPhase, Replace
from hyperpod_ext.runtime.membership.node_states import HAD_RANKS, NodeState

_RESERVED = 0.5
"""Share of `restart.node_wait_s` for which a node number stays reserved for a starting node. If the starting node is
lost too, the rest of `node_wait_s` is left for another node."""


class Admission:
    """Accepts or refuses agents that connect to the coordinator, for the first time or again."""

    def __init__(self, job: JobContext, actions: Actions) -> None:
        self._run, self._members, self._membership, self._outbox = job.run, job.members, job.membership, job.outbox
        self._formation, self._events, self._actions, self._end = job.formation, job.events, actions, actions.end
        self._reserved: dict[Address, tuple[int, float]] = {}
        """Maps the address at which a starting node will listen to its reserved node number, and to the time at which
        the reservation ends."""

    def refusal(self, node: int, handshake: c.AgentHandshake) -> str:
        """Return the reason why the coordinator refuses the agent of `node`; empty if it accepts the agent."""
        config = self._run.config
        if not 0 <= node < config.most_nodes + config.spares:
            spares = f" and {config.spares} spares" if config.spares else ""
            return f"it is none of this job's {config.most_nodes} nodes{spares}"
        if self._members.stepped_down:
            return "the coordinator has stepped down, because it reaches too few of the job's nodes"
        if node in self._members.agents:
            return "another agent is connected as this node"
        if handshake.knows_job:
            is_member = self._members.is_known(node, handshake.id)
            return "" if is_member else "the job has continued without this node, because the node was lost"
        if self._membership.is_shut_out(node):
            return f"it was lost {self._membership.states.losses[node]} times, and may not join again"
        return ""

    def free_number(self, wanted: int, listens: Address | None, now: float) -> int | None:
        """Reserve a free node number, if possible `wanted`, and return it; None if all numbers are in use or reserved.

        Args:
            listens: address at which the requesting node will listen. The number is reserved for this address, because
                the node may need seconds until it connects.
        """
        config, connected = self._run.config, self._members.agents
        if self._members.stepped_down or self._end.ended.done():
            return None
        self._reserved = {by: (node, until) for by, (node, until) in self._reserved.items() if now < until}
        in_use = connected.keys() | {node for by, (node, _) in self._reserved.items() if by != listens}
        free = [node for node in range(config.most_nodes + config.spares) if node not in in_use]
        lost = {self._membership.nodes[rank] for rank in self._membership.unassigned}
        may_return = self._members.expected
        found = [node for node in free if not self._membership.is_shut_out(node)]
        number = min(found, key=lambda node: (node != wanted, node not in lost, node in may_return, node), default=None)
        # reserve no number before the job begins, because until then each node requests its own number
        if number is not None and listens is not None and self._formation.job_has_begun:
            self._reserved[listens] = number, now + config.restart.node_wait_s * _RESERVED
        return number

    def welcome(self, node: int, handshake: c.AgentHandshake, agent: Agent) -> None:
        """Accept the agent of `node`. A new agent's node joins the job; an agent that connects again receives the
        orders that it missed."""
        if self._end.ended.done():  # the job has ended, so order the node to end
            agent.writer.write(frame_of(self._end.order()))
            self._members.agents[node] = agent
            return
        self._members.enter(node, handshake, agent)
        self._reserved = {by: reserved for by, reserved in self._reserved.items() if reserved[0] != node}
        self._end.agent_came(node)
        if handshake.knows_job:
            self._take_back(node, handshake)
            return
        self._events.write("node_joined", node=node, pid=handshake.pid)
        if self._formation.job_has_begun:
            actions = self._membership.node_came(node, time.time())
            self._outbox.share_job_state()
            # send the current generation, because the new node has not received earlier aborts
            generation = self._membership.generation
            self._outbox.send(node, c.AbortGeneration(generation=generation, rank=-1))
            self._actions.carry_out(actions)
        elif set(range(self._run.config.nodes)) <= self._members.agents.keys():
            self._begin_job()

    def _begin_job(self) -> None:
        """Begin the job, because all nodes that get ranks are connected. Nodes with higher numbers become spares."""
        self._formation.begins(time.monotonic())
        self._members.begin()
        self._membership.begin_with_spares({node for node in self._members.members if node >= self._run.config.nodes})
        self._outbox.share_job_state()
        self._actions.carry_out([Replace(rank) for rank in self._membership.nodes])

    def _take_back(self, node: int, handshake: c.AgentHandshake) -> None:
        """Accept a node that was already in the job, and send it all orders that it missed. The node was connected to
        an earlier coordinator, or had lost its connection to this coordinator."""
        membership = self._membership
        self._end.know_exits(handshake.exited)
        membership.step_committed(handshake.committed)
        if handshake.term == self._run.term:
            self._actions.carry_out(membership.meet_again(node, handshake.generation))
        self._outbox.share_with(node)
        if membership.phase is JobPhase.ENDED:
            self._outbox.send(node, c.FinishTraining(generation=membership.generation))
            self._end.check_exits()
            return
        moved = membership.renumbering.since(handshake.moved_in)
        if handshake.generation < membership.generation:
            moved_in = 0 if moved is None else membership.renumbering.newest
            generation, numbers = membership.generation, moved or {}
            abort = c.AbortGeneration(
                generation=generation, rank=-1, moved=numbers, moved_in=moved_in, drop_joining=True
            )
            self._outbox.send(node, abort)
        here = set(membership.ranks_on(node))
        staying = [rank for rank, worker in handshake.workers.items() if not worker.joining]
        there = {rank if moved is None else moved.get(rank) for rank in staying}
        for rank in sorted(here - there):
            self._outbox.send(node, c.StartWorker(rank=rank))
        if handshake.leaving and node not in membership.states.asked:
            self._actions.carry_out(membership.leave(node))
        state = membership.states[node]
        if state is NodeState.DECOMMISSIONED or (state in HAD_RANKS and handshake.workers):
            # decommission the node again, because the first order or the node's answer may have been lost
            self._outbox.send(node, c.DecommissionNode())
        elif not here and handshake.workers:  # end workers that were started for a cancelled resize
            self._outbox.send(node, c.EndWorkers())
