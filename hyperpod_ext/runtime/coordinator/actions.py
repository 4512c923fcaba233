"""Carries out the actions that `Membership` returns: sends messages to agents, writes events, and starts timers that
call the membership later."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyperpod_ext.runtime.coordinator.job_context import JobContext
from hyperpod_ext.runtime.coordinator.job_end import ASK_LATER_S, JobEnd
from hyperpod_ext.runtime.coordinator.queries import DurableQuery, Excluded
from hyperpod_ext.runtime.coordinator.resize_clock import ResizeClock
from hyperpod_ext.runtime.coordinator.resize_orders import tell_wanted
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.decision_parts import DecisionParts
from hyperpod_ext.runtime.membership import actions as m
from hyperpod_ext.runtime.membership.node_states import NodeState
from hyperpod_ext.runtime.snapshot.select import Decision

_SCALING_TIMEOUT_S = 60.0
"""Number of seconds to wait for additional nodes, if `elastic.scaling_timeout_s` is not set."""


class Timers:
    """Delayed function calls, each with a name. Setting a call replaces an earlier call of the same name."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        self.cancel(name)
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, call)

    def cancel(self, prefix: str) -> None:
        """Cancel all delayed calls whose names begin with `prefix`."""
        for name in [name for name in self._timers if name.startswith(prefix)]:
            self._timers.pop(name).cancel()


class Actions:
    """Carries out the actions that `Membership` returns."""

    def __init__(self, job: JobContext, end: JobEnd) -> None:
        self._run, self._members, self._membership, self._outbox = job.run, job.members, job.membership, job.outbox
        self._ranks, self._schedule, self._formation = job.ranks, job.schedule, job.formation
        self._log, self.end = job.events.write, end
        self._timers = Timers()
        self._checkpoint = ""
        """Name of the durable checkpoint from which ranks restore in this generation; empty if no rank restores from a
        durable tier."""
        self.durable = DurableQuery(self._ask_durable)
        self.resize_clock = ResizeClock()

    def carry_out(self, actions: Sequence[m.Action]) -> None:
        """Carry out the actions in order, then send the changes of the job state to the agents."""
        for action in actions:
            self._do(action)
        if actions and not self.end.ended.done():
            self._outbox.share_job_state()

    def _do(self, action: m.Action) -> None:
        generation = self._membership.generation
        match action:
            case m.Begin(_, decision):
                self._begin(decision)
            case m.AskDurable(exclude):
                self.durable.ask(exclude)
            case m.Restore(_, decision):
                self._try_next(decision)
            case m.Go(step):
                self._go(step)
            case m.Abort() if self.end.is_stopping:
                # a rank failed before all ranks had saved a common last step: end with the steps saved so far
                self.end.end("cancelled")
            case m.Abort(_, rank):
                self._abort(rank)
            case m.Replace(rank):
                if self._membership.phase is m.JobPhase.FORMING:
                    # restart the time limit for forming a generation, so that the new process gets the full time
                    self._formation.begins(time.monotonic())
                self._outbox.send(self._membership.nodes[rank], c.StartWorker(rank=rank))
            case m.TakeOver(node, ranks):
                self._take_over(node, ranks)
            case m.AwaitNode(node):
                self._await_node(node)
            case m.Finish():
                self._outbox.to_all(c.FinishTraining(generation=generation))
            case m.Fail():
                self.end.fail(action)
            case m.Cancel():
                self.end.cancel()
            case m.Log(event, fields):
                self._write(event, fields)
            case _:
                self._resize(action)

    def _resize(self, action: m.Action) -> None:
        """Carry out one action that belongs to a resize or to another new rank assignment."""
        generation = self._membership.generation
        match action:
            case m.Prepare(rank, node, world_size):
                self._outbox.send(node, c.PrepareWorker(rank=rank, world_size=world_size))
            case m.EndPrepared(node):
                self._outbox.send(node, c.EndWorkers())
            case m.AskStop(number, step, later):
                ask = c.AskStop(generation=generation, number=number, step=step)
                asyncio.get_running_loop().call_later(ASK_LATER_S if later else 0.0, self._outbox.to_all, ask)
            case m.StopAt(number):
                self._outbox.to_all(c.StopAtStep(generation=generation, number=number))
            case m.WithdrawStop(number):
                self._outbox.to_all(c.WithdrawStop(generation=generation, number=number))
            case m.WantNodes(count):
                self._want_nodes(count)
            case m.Decommission(node):
                self._log("node_decommissioned", node=node)
                self._outbox.send(node, c.DecommissionNode())
            case m.Release(nodes):
                self._release(nodes)

    # --- generations ----------------------------------------------------------------------------

    def _begin(self, decision: Decision) -> None:
        membership = self._membership
        world_size, generation = len(membership.nodes), membership.generation
        full_size = membership.full_size if membership.continuing.is_short else None
        self._log("generation", generation=generation, step=decision.step, world_size=world_size)
        self._checkpoint = decision.checkpoint
        self._ranks.begins()
        every = self._schedule.begins(time.monotonic())
        membership.retention.next_due = self._schedule.policy.next_due
        follows, addresses = self._ranks.news_of_stores(generation)
        self._outbox.to_each(
            lambda part, peers: c.BeginGeneration(
                generation=generation,
                decision=part,
                world_size=world_size,
                full_size=full_size,
                addresses=addresses,
                follows=follows,
                peers=peers,
                run=self._run.name,
                memory_every=every,
                peer_step=self._schedule.peer_step,
            ),
            DecisionParts(decision, membership.nodes),
        )

    def _try_next(self, decision: Decision) -> None:
        generation, run = self._membership.generation, self._run.name
        self._checkpoint = decision.checkpoint
        self._outbox.to_each(
            lambda part, peers: c.TryNext(generation=generation, decision=part, peers=peers, run=run),
            DecisionParts(decision, self._membership.nodes),
        )

    def _go(self, step: int) -> None:
        self._log("go", step=step, checkpoint=self._checkpoint)
        self._schedule.went_on(self._membership)
        self._outbox.to_all(c.GoOn(generation=self._membership.generation, step=step))
        if self._membership.states.going:
            self._release_in_time()

    def _abort(self, rank: int) -> None:
        self._formation.begins(time.monotonic())
        membership, renumbering = self._membership, self._membership.renumbering
        if renumbering.newest == membership.generation:
            self._ranks.stores.clear()
            # send the job state first: an agent that becomes the next coordinator needs the new rank numbers
            self._outbox.share_job_state()
        # include the new rank numbers, because an agent that missed the last renumbering still uses old ones
        moved, moved_in = renumbering.last, renumbering.newest
        generation = membership.generation
        self._outbox.to_all(c.AbortGeneration(generation=generation, rank=rank, moved=moved, moved_in=moved_in))

    def _ask_durable(self, exclude: Excluded) -> int | None:
        if self.end.ended.done() or not self._members.agents:
            return None
        node = min(self._members.agents)
        self._outbox.send(node, c.AskDurableTiers(exclude=exclude))
        return node

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "world" and self._membership.continuing.enabled:
            fields = {**fields, "full_size": self._membership.full_size, "samples": self._run.config.restart.samples}
        self._log(event, **fields)
        if event == "world":
            refused = self.resize_clock.reassigned(fields, self._membership.renumbering.last)
            if refused is not None:
                self._log("resize_refused", **refused)

    # --- nodes ----------------------------------------------------------------------------------

    def _take_over(self, node: int, ranks: Sequence[int]) -> None:
        self._log("node_replaced", node=node, ranks=list(ranks))
        self._timers.cancel("await node ")
        for other in {self._membership.nodes[rank] for rank in self._membership.unassigned}:
            self._await_node(other)

    def _await_node(self, node: int) -> None:
        wait_s = self._run.config.restart.node_wait_s
        self._log("awaiting_node", node=node, seconds=wait_s)
        give_up = functools.partial(self._membership.no_node_came, node, wait_s)
        self._timers.set(f"await node {node}", wait_s, lambda: self.carry_out(give_up()))

    def _want_nodes(self, count: int) -> None:
        """Write a file with the numbers of the `count` wanted nodes, for the process that starts nodes. If the wanted
        nodes do not join within a time limit, continue with fewer nodes."""
        config, membership, members = self._run.config, self._membership, self._members
        here = membership.states.those(NodeState.MEMBER, NodeState.SPARE, NodeState.JOINING) & members.members.keys()
        # the number of a leaving node is free only when that node has left
        free = set(range(config.most_nodes + config.spares)) - members.members.keys() - members.agents.keys()
        wanted = sorted(here | set(sorted(free)[: max(0, count - len(here))]))
        tell_wanted(self._run.run_dir, wanted)
        self._log("nodes_wanted", nodes=wanted)
        wait_s = (config.elastic.scaling_timeout_s if config.elastic else None) or _SCALING_TIMEOUT_S
        self._timers.set("more nodes", wait_s, lambda: self.carry_out(membership.gave_up_waiting()))

    def _release_in_time(self) -> None:
        """Start a timer that releases leaving nodes after their grace period, even if some ranks have not saved a
        snapshot yet on their new node."""
        config, membership = self._run.config, self._membership
        grace_s = (config.elastic.graceful_shutdown_s if config.elastic else None) or config.checkpoint.grace_s
        late = functools.partial(membership.release_retained, membership.committed, late=True)
        self._timers.set("release", grace_s, lambda: self.carry_out(late()))

    def _release(self, nodes: Sequence[int]) -> None:
        """Remove `nodes` from the job. The nodes are released once all agents that may become coordinator know the new
        set of members, among which majorities are then counted. Order all agents to delete snapshots of earlier rank
        assignments. If `nodes` is empty, only the order to delete snapshots is sent."""
        for node in nodes:
            self._log("node_left", node=node)
            self._members.forget(node)
        if nodes and self._run.config.elastic is not None:
            tell_wanted(self._run.run_dir, sorted(self._members.members))
        self._outbox.to_all(c.MembersReleased(world_size=len(self._membership.nodes)))
        if nodes:
            self._outbox.share_job_state()
