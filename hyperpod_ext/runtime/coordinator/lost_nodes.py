"""Lost nodes: has the job go on without them, or stands down if this coordinator is the side that is cut off."""

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
"""Searches for silent nodes per lease."""
_PROBE = 1 / 24
"""Share of the lease in which the agent of a connection that has broken must take another one."""


class LostNodes:
    """Decides which nodes of one job are lost."""

    def __init__(self, job: JobContext, actions: Actions) -> None:
        self._run, self._members, self._membership, self._outbox = job.run, job.members, job.membership, job.outbox
        self._formation, self._log, self._actions, self._end = job.formation, job.events.write, actions, actions.end
        self.ran_at = time.monotonic()
        """When this process was last known to run."""
        self._probing: dict[int, asyncio.Task[None]] = {}

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, or goes on without this coordinator."""
        return self._end.ended.done() or self._members.stepped_down

    @property
    def has_left(self) -> bool:
        """Whether the coordinator's own node has left the job: others coordinate, or are about to."""
        return self._members.stepped_down and self._run.node not in self._members.members

    @property
    def _others_wait(self) -> bool:
        """Whether the other nodes cannot go on by themselves: training is held from outside, or all ranks are done."""
        return bool(self._membership.held) or self._end.final_save.begun

    def stop(self) -> None:
        """Cancel all probes."""
        for task in self._probing.values():
            task.cancel()

    # --- silence --------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Lose silent nodes. If no majority would be left, this node is the one that is cut off: then no loss is
        counted, as that could end the job, which the others continue."""
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
                return  # until the others are heard of, or overdue as well
        for node, cause in overdue.items():
            self.lose(node, cause)

    def notice_pause(self, now: float) -> None:
        """Detect that this process stood still: its unread messages are read now, and others may go on without it."""
        lease_s = self._run.config.restart.lease_s
        if now - self.ran_at <= 2 * lease_s / LOOKS:
            return
        self.ran_at = now
        self._members.was_paused(now, lease_s)
        if self._formation.job_has_begun and self._members.others_may_go_on and not (self.is_over or self._others_wait):
            self._members.doubt_all(now)

    # --- connections that end -------------------------------------------------------------------

    def line_ended(self, node: int, cause: str) -> None:
        """Lose the node whose connection ended. If that would end the job, wait for the other connections first: if
        they end as well, this node is the one that is cut off, and others go on under another coordinator."""
        if self.has_left:  # it goes by another coordinator, which says what becomes of it
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
        """Lose a node whose agent no longer listens. An agent that listens has lost a connection only, and has a third
        of the lease to open another one."""
        try:
            async with asyncio.timeout(self._run.config.restart.lease_s * _PROBE):
                _, writer = await open_tcp(*address)
            writer.close()
        except OSError:
            if node in self._members.doubted:
                self.lose(node, cause)

    # --- losses ---------------------------------------------------------------------------------

    def lose(self, node: int, cause: str) -> None:
        """Remove a node that is gone, or that may be gone."""
        if (agent := self._members.agents.get(node)) is not None:
            self._tell_stop(node, f"the others have given it up ({cause})")
            agent.writer.close()
        known, seen = set(self._members.members), time.monotonic()
        enough = self._members.leave(node)
        if not enough and self._membership.held:
            self._members.lost_while_held |= known
            enough = True
        if not self.is_over:
            self._log("node_lost", t=seen, node=node, cause=cause)
        if self.is_over or self._end.final_save.begun:
            self._end.agent_lost(node)
        elif not self._formation.job_has_begun:
            if node < self._run.config.nodes:
                self._end.fail(
                    Fail("JobFailedError", f"the agent of node {node} is gone before the job began: {cause}")
                )
        elif not enough:
            self.lose_majority(known)
        elif self._membership.phase is JobPhase.ENDED:
            self._end.lost_when_done(node)
        else:
            self._go_on_without(node, cause, seen)

    def _go_on_without(self, node: int, cause: str, seen: float) -> None:
        membership = self._membership
        ranks, step, before = membership.ranks_on(node), membership.committed + 1, len(membership.faults)
        actions = membership.node_lost(node, cause, time.time())
        for rank in ranks if len(membership.faults) > before else ():  # of a job that is held it may be none
            fault = {"rank": rank, "node": node, "step": step, "cause": f"node {node} is lost: {cause}"}
            level = EscalationLevel.NODE.value
            self._log("fault", t=seen, **fault, died=True, phase="", kind="lost", escalation_level=level)
        self._actions.carry_out(actions)
        self._outbox.share_job_state()
        if not self._end.ended.done():
            self._actions.durable.node_lost(node)

    def lose_majority(self, members: Set[int], silent: Set[int] = frozenset()) -> None:
        """Stop the nodes that are left: they are too few, so others may go on."""
        reached = self._members.agents.keys() - silent
        left = ", ".join(str(node) for node in sorted(reached | {self._run.node}))
        why = f"of the job's {len(members)} nodes only {left} can be reached, which is no majority"
        self.step_down(reached=sorted(reached))
        for node in list(self._members.agents):
            self._tell_stop(node, why, "Look at the network between the nodes; the others may have gone on.")

    def give_up(self, node: int, cause: str) -> None:
        """Lose a node that reports that it cannot go on; the coordinator's own node leaves the job to another
        coordinator."""
        if node != self._run.node:
            self.lose(node, cause)
            return
        self._members.gives_up = cause
        self._outbox.share_job_state()  # the next coordinator names the cause in its loss
        self.step_down(cause=cause)
        self._tell_stop(node, cause)

    def step_down(self, **why: Any) -> None:
        """Coordinate the job no longer."""
        self._members.stepped_down = True
        self._log("stepped_down", node=self._run.node, term=self._run.term, **why)
        for node, agent in self._members.agents.items():  # the next coordinator is not sent what the log has
            self._outbox.send(node, c.Heard(heard=agent.events))

    def _tell_stop(self, node: int, why: str, hint: str = "") -> None:
        self._outbox.send(node, c.StopNode(why=why, hint=hint))
