"""Detects lost nodes, and continues the job without them. A coordinator whose own node is cut off steps down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Set
from typing import Any

from hyperpod_ext.runtime.coordinator.actions import Actions
from hyperpod_ext.runtime.coordinator.job_context import JobContext
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.connections import open_tcp
from hyperpod_ext.runtime.ipc.declared import Address
from hyperpod_ext.runtime.membership.actions import EscalationLevel, Fail, JobPhase

LOOKS = 6
"""Number of checks for silent nodes within one lease (`restart.lease_s` seconds). A node that is silent for half a
lease is treated as lost."""
_PROBE = 1 / 24
"""Share of the lease within which an agent whose connection broke must accept a test connection. The coordinator also
waits for this share of the lease between two test connections to an agent."""


class LostNodes:
    """Decides which nodes of a job are lost, and handles each loss."""

    def __init__(self, job: JobContext, actions: Actions) -> None:
        self._run, self._members, self._membership, self._outbox = job.run, job.members, job.membership, job.outbox
        self._formation, self._log, self._actions, self._end = job.formation, job.events.write, actions, actions.end
        self.ran_at = time.monotonic()
        """Time of the last check that this process is running. If a check comes much later than planned, the process
        was paused since the last check."""
        self._probing: dict[int, asyncio.Task[None]] = {}

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, or this coordinator has stepped down."""
        return self._end.ended.done() or self._members.stepped_down

    @property
    def has_left(self) -> bool:
        """Whether the coordinator's own node has left the job, so that another node becomes the coordinator."""
        return self._members.stepped_down and self._run.node not in self._members.members

    @property
    def _others_wait(self) -> bool:
        """Whether the other nodes need this coordinator, because training is on hold or is done on all ranks."""
        return bool(self._membership.held) or self._end.final_save.begun

    def stop(self) -> None:
        """Cancel all running tests of whether an agent still listens."""
        for task in self._probing.values():
            task.cancel()

    # --- silence --------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Remove from the job the nodes that have been silent for too long.

        If too few nodes are reachable without the silent nodes, the coordinator's own node is probably cut off from the
        network. In this case, the coordinator steps down and records no losses, because recorded losses could end a job
        that the other nodes continue.
        """
        self.notice_pause(now)
        members, lease_s = self._members, self._run.config.restart.lease_s
        overdue = members.overdue(now, lease_s)
        if members.unsure_since is not None and self._others_wait:
            members.unsure_since = None
            self._end.is_sure()
        elif members.unsure_since is not None:
            if now > members.unsure_since + lease_s / 3:
                self.lose_majority(set(members.members), members.members.keys() - members.shown)
            return
        if overdue and self._formation.job_has_begun and not self._others_wait:
            if not members.enough_without(overdue.keys()):
                self.lose_majority(set(members.members), overdue.keys())
                return
            if not members.enough_without(members.silent(now, lease_s) | overdue.keys()):
                # remove no node until each of the other silent nodes has sent a message or has become overdue
                return
        for node, cause in overdue.items():
            self.lose(node, cause)

    def notice_pause(self, now: float) -> None:
        """Detect that this process was paused. After a pause, agents are not treated as silent, because their messages
        have not been read yet. After a pause, the coordinator also checks whether the other nodes have elected another
        coordinator."""
        lease_s = self._run.config.restart.lease_s
        if now - self.ran_at <= 2 * lease_s / LOOKS:
            return
        self.ran_at = now
        self._members.was_paused(now, lease_s)
        if self._formation.job_has_begun and self._members.others_may_go_on and not (self.is_over or self._others_wait):
            self._members.doubt_all(now)

    # --- connections that end -------------------------------------------------------------------

    def line_ended(self, node: int, cause: str) -> None:
        """Handle the end of the connection to `node`. The node is removed from the job once a test has shown that its
        agent no longer listens.

        If losing the node would end the job, make no test, but wait a third of the lease. If the connections to other
        nodes end too, the coordinator's own node is cut off, and the other nodes continue under another coordinator.
        """
        if self.has_left:
            # this agent disconnects because it connects to the new coordinator, so its node is not lost
            self._members.leave(node)
            return
        now, lease_s = time.monotonic(), self._run.config.restart.lease_s
        self.notice_pause(now)
        counts = self._formation.job_has_begun and not (self.is_over or self._end.final_save.begun)
        counts = counts and node != self._run.node
        in_doubt = self._members.unsure_since is not None or self._membership.ends_with_loss(node, time.time())
        address = self._members.members[node]["address"] if node in self._members.members else None
        if counts and self._members.others_may_go_on and in_doubt:
            self._members.doubt(node, cause, now + lease_s / 3)
        elif address is None or self.is_over:
            self.lose(node, cause)
        else:
            self._members.doubt(node, cause, now + lease_s / 3)
            self._probing[node] = asyncio.create_task(self._probe(node, (str(address[0]), int(address[1])), cause))

    async def _probe(self, node: int, address: Address, cause: str) -> None:
        """Test whether the agent of `node` still listens, and remove the node if it does not. An agent that listens
        gets a third of the lease to connect again. The test is made twice, because the sockets of a killed process are
        closed one after another."""
        limit_s = self._run.config.restart.lease_s * _PROBE
        for pause_s in (0.0, limit_s):
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(limit_s):
                    _, writer = await open_tcp(*address)
                writer.close()
            except OSError:
                if node in self._members.doubted:
                    self.lose(node, cause)
                return

    # --- losses ---------------------------------------------------------------------------------

    def lose(self, node: int, cause: str) -> None:
        """Remove a lost node from the job. If the node's agent is still connected, order the agent to stop."""
        if (agent := self._members.agents.get(node)) is not None:
            self._send_stop(node, f"the job treats this node as lost ({cause})")
            agent.writer.close()
        known, seen = set(self._members.members), time.monotonic()
        enough = self._members.leave(node)
        if not enough and self._membership.held:
            self._members.lost_while_held |= known
            self._membership.held_for_fault.clear()  # keep training on hold, because the lost nodes may still train
            enough = True
        if not self.is_over:
            self._log("node_lost", t=seen, node=node, cause=cause)
        if self.is_over or self._end.final_save.begun:
            self._end.agent_lost(node)
        elif not self._formation.job_has_begun:
            if node < self._run.config.nodes:
                self._end.fail(
                    Fail("JobFailedError", f"the agent of node {node} was lost before the job began: {cause}")
                )
        elif not enough:
            self.lose_majority(known)
        elif self._membership.phase is JobPhase.ENDED:
            self._end.lost_when_done(node)
        else:
            self._continue_without(node, cause, seen)

    def _continue_without(self, node: int, cause: str, seen: float) -> None:
        membership = self._membership
        ranks, step, before = membership.ranks_on(node), membership.committed + 1, len(membership.faults)
        actions = membership.node_lost(node, cause, time.time())
        # log `fault` events only if the loss counts as a fault, which it does not while training is on hold
        for rank in ranks if len(membership.faults) > before else ():
            fault = {"rank": rank, "node": node, "step": step, "cause": f"node {node} is lost: {cause}"}
            level = EscalationLevel.NODE.value
            self._log("fault", t=seen, **fault, died=True, phase="", kind="lost", escalation_level=level)
        self._actions.carry_out(actions)
        self._outbox.share_job_state()
        if not self._end.ended.done():
            self._actions.durable.node_lost(node)

    def lose_majority(self, members: Set[int], silent: Set[int] = frozenset()) -> None:
        """Step down, and order the reachable nodes to stop. The reachable nodes are not a majority, so the unreachable
        nodes may continue the job."""
        reached = self._members.agents.keys() - silent
        left = ", ".join(str(node) for node in sorted(reached | {self._run.node}))
        why = f"of the job's {len(members)} nodes only {left} can be reached, which is no majority"
        self.step_down(reached=sorted(reached))
        for node in list(self._members.agents):
            self._send_stop(node, why, "Check the network between the nodes. The other nodes may continue the job.")

    def give_up(self, node: int, cause: str) -> None:
        """Remove a node whose agent has reported that it cannot continue. If the coordinator's own node cannot
        continue, step down, so that another node becomes the coordinator."""
        if node != self._run.node:
            self.lose(node, cause)
            return
        self._members.gives_up = cause
        self._outbox.share_job_state()  # the next coordinator will log `cause`
        self.step_down(cause=cause)
        self._send_stop(node, cause)

    def step_down(self, **why: Any) -> None:
        """Stop coordinating the job. `why`: fields of the `stepped_down` event."""
        self._members.stepped_down = True
        self._log("stepped_down", node=self._run.node, term=self._run.term, **why)
        for node, agent in self._members.agents.items():
            # send the number of received events, so that the agent does not resend those events to the next coordinator
            self._outbox.send(node, c.Heard(heard=agent.events))

    def _send_stop(self, node: int, why: str, hint: str = "") -> None:
        self._outbox.send(node, c.StopNode(why=why, hint=hint))
