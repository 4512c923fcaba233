"""The coordinator of a job, which runs in the process of one agent. The coordinator passes reports of all agents to
`Membership`, which makes the decisions, and carries out the resulting actions.

The parts of the coordinator share a `JobContext`. `admission.py` admits agents, `reports.py` processes reports,
`lost_nodes.py` finds lost nodes, and `actions.py` carries out the membership's actions. A few agents receive a copy of
the job state and its changes. If the coordinator is lost, one of these agents replaces it
(`agent/coordinator_client.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
import traceback
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Self

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.resize import MoveOrder
from hyperpod_ext.runtime.coordinator.actions import Actions
from hyperpod_ext.runtime.coordinator.admission import Admission
from hyperpod_ext.runtime.coordinator.job_context import JobContext
from hyperpod_ext.runtime.coordinator.job_end import FinalState, JobEnd
from hyperpod_ext.runtime.coordinator.job_run import JobRun
from hyperpod_ext.runtime.coordinator.lost_nodes import LOOKS, LostNodes
from hyperpod_ext.runtime.coordinator.members import Agent, Members
from hyperpod_ext.runtime.coordinator.outbox import frame_of
from hyperpod_ext.runtime.coordinator.reports import Reports
from hyperpod_ext.runtime.coordinator.resize_orders import (
    orders_due,
    orders_overtaken,
    orders_were_left,
    read_orders,
)
from hyperpod_ext.runtime.events.capacity import orders_accepted
from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.clocks import Clocks
from hyperpod_ext.runtime.ipc.declared import Address
from hyperpod_ext.runtime.membership.actions import JobPhase
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.membership.quorum import newest
from hyperpod_ext.runtime.membership.rank_assignment import Scale
from hyperpod_ext.runtime.membership.rescaling import OVERTAKEN
from hyperpod_ext.runtime.metrics import tracing
from hyperpod_ext.runtime.metrics.exporter import MetricsExporter

_ORDERS_S = 0.1
"""Number of seconds between two checks for new order files (orders to resize the job or to move ranks)."""


class Coordinator:
    """The coordinator of one job."""

    def __init__(
        self, run: JobRun, membership: Membership, members: Members, inherited: Mapping[str, Any] | None = None
    ) -> None:
        config = run.config
        self.job = job = JobContext.of(run, members, membership, inherited, time.monotonic())
        self._run, self.membership, self.members, self._outbox = run, membership, members, job.outbox
        self.events, self._log, self._formation = job.events, job.events.write, job.formation
        self.end = JobEnd(job)
        self.actions = Actions(job, self.end)
        self.lost_nodes = LostNodes(job, self.actions)
        self.reports = Reports(job, self.actions, self.lost_nodes)
        self.admission = Admission(job, self.actions)
        self._clocks = Clocks()
        self._metrics: MetricsExporter | None = None
        if config.metrics is not None:
            self._metrics = MetricsExporter(config, self.events.past(), self._log)
            self.events.listeners.append(self._metrics.add)
        self._trace: tracing.TraceSender | None = None
        if tracing.is_asked_for():
            self._trace = tracing.TraceSender(run.name, config.name, self.events.past())
            self.events.listeners.append(self._trace.add)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def first(cls, config: RuntimeConfig, node: int, run_dir: Path, master_port: int) -> Self:
        """Create the first coordinator of a job."""
        nodes = {rank: rank // config.workers_per_node for rank in range(config.world_size)}
        durable, budgets = bool(config.checkpoint.shared()), Budgets.of(config.restart)
        membership = Membership(
            nodes,
            budgets,
            durable=durable,
            scale=_scale(config),
            reserve=config.spares,
            continues=_continues(config),
            script_saves=config.restarts_script,
        )
        # ignore the orders that are in the run folder now: they are from an earlier run, because orders for this run
        # are written only after its event log was created
        earlier = set(read_orders(run_dir))
        run = JobRun(config, node, run_dir, master_port, secrets.token_hex(8))
        made = cls(run, membership, Members(node, memberships=[{node}], has_begun=False))
        made._start(earlier)
        made._log("job_started", world_size=config.world_size, nodes=config.nodes, spares=config.spares)
        return made

    @classmethod
    def successor(
        cls,
        config: RuntimeConfig,
        node: int,
        run_dir: Path,
        own: c.AgentHandshake,
        votes: Sequence[c.AgentHandshake],
        gone: Set[int] = frozenset(),
    ) -> Self:
        """Create the coordinator that replaces a lost coordinator. The job state comes from the handshakes of this
        agent (`own`) and of the agents that voted for it (`votes`).

        Args:
            gone: nodes that the HyperPod operator has reported as removed, when it stopped all ranks. If nodes were
                removed, training is on hold until the operator's next command to this agent, except with `policy:
                continue`.
        """
        handshakes = [own, *votes]
        job_states = [handshake.job_state for handshake in handshakes if handshake.job_state is not None]
        job_state = newest(job_states)
        membership, actions = Membership.revived(
            job_state["membership"],
            Budgets.of(config.restart),
            durable=bool(config.checkpoint.shared()),
            generation=max(handshake.generation for handshake in handshakes),
            committed=max(handshake.committed for handshake in handshakes),
            scale=_scale(config),
            reserve=config.spares,
            continues=_continues(config),
            script_saves=config.restarts_script,
        )
        term = max(int(job_state["term"]) for job_state in job_states) + 1
        run = JobRun(config, node, run_dir, int(job_state["master_port"]), str(job_state["run"]), term)
        members, lost = Members(node), int(job_state["coordinator"])
        known = {int(its_node): member for its_node, member in job_state["members"].items()}
        members.succeed(known, lost, time.monotonic() + config.restart.lease_s / 2, gone)
        if gone and not membership.continuing.enabled:
            membership.held.add(node)
        made = cls(run, membership, members, job_state)
        resized = config.elastic is not None or _continues(config) or orders_were_left(run_dir)
        # do not read `step` events: there are so many that reading them would delay the recovery of all nodes
        written = made.events.read(steps=False) if resized else Events()
        made._start(orders_accepted(written))
        made._log("coordinator", node=node, before=lost, term=term)
        made.actions.carry_out(actions)
        if resized:
            made.actions.resize_clock.resume(written)
        if lost in members.members:
            made.lost_nodes.lose(lost, job_state.get("gives_up") or "its agent, which ran the coordinator, is gone")
        for other in sorted(gone & members.members.keys()):
            members.memberships = [set(members.members) - gone]
            made.lost_nodes.lose(other, "another pod has replaced this node, or no pod has its rank any more")
        return made

    def _start(self, orders_accepted: set[str]) -> None:
        self.membership.retention.next_due = self.job.schedule.policy.next_due
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._look_for_orders(orders_accepted))]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail the job if a background task has raised an exception. Without the background tasks, lost nodes and new
        orders would not be detected."""
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)
            self.broke(f"{type(error).__name__}: {error}")

    # --- calls of the agent in this process ---------------------------------------------------------

    @property
    def ended(self) -> asyncio.Future[FinalState]:
        """Future with the final state of the job: succeeded, failed or cancelled."""
        return self.end.ended

    @property
    def all_uploaded(self) -> asyncio.Event:
        """Event that is set once every node has uploaded its part of the last step."""
        return self.end.all_uploaded

    def cancel(self) -> None:
        """Cancel the job, because a user has requested it."""
        self.end.cancel()

    def broke(self, why: str) -> None:
        """Fail the job because of an internal error of the coordinator. `why`: description of the error."""
        self.end.broke(why)

    def show(self) -> None:
        """Open the metrics endpoint, if the job has one."""
        if self._metrics is not None:
            self._metrics.open()

    def stop(self) -> None:
        """Stop all background tasks."""
        for task in self._tasks:
            task.cancel()
        self.lost_nodes.stop()

    async def close(self) -> None:
        """Wait until all agents have received their last message and closed their connection, and until the final
        report is written."""
        self.stop()
        for agent in self.members.agents.values():
            with contextlib.suppress(ConnectionError):  # the agent may have closed the connection
                await agent.writer.wait_closed()
        await self.end.reported()
        if self._metrics is not None:
            await self._metrics.close()
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)
        self.events.close()

    # --- one connection per agent ---------------------------------------------------------------

    async def serve(
        self,
        handshake: c.AgentHandshake,
        reading: asyncio.Task[wire.Message | None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Receive and process the messages of one agent until its connection closes.

        Args:
            reading: running task that reads the first message after the agent's handshake.
        """
        node = handshake.node
        self.lost_nodes.notice_pause(time.monotonic())
        while self.members.unsure_since is not None and not (handshake.knows_job or self.lost_nodes.is_over):
            # accept a new agent only when no other coordinator can exist
            await asyncio.sleep(self._run.config.restart.lease_s / 60)
        if (former := self.members.agents.get(node)) is not None:
            if not handshake.knows_job:
                # wait, because a restarted agent may connect before the loss of the node's former agent is detected
                await former.confirmed()
            # if the agent itself has reconnected, close its old connection
            elif self.members.is_known(node, handshake.id):
                self.members.agents.pop(node).hang_up()
        if not handshake.knows_job and node in self.members.doubted and self._formation.job_has_begun:
            # this is a new agent process without the job state, so the node's former agent is lost
            self.lost_nodes.lose(node, self.members.doubted[node])
        if self.lost_nodes.has_left:
            return  # close the connection without a message: a StopNode would make the agent's node leave the job
        if refusal := self.admission.refusal(node, handshake):
            writer.write(frame_of(c.StopNode(why=refusal, hint="")))
            await writer.drain()
            return
        agent = Agent(writer, time.monotonic())
        try:
            self._sync_clock(node, handshake.clock)
            self.admission.welcome(node, handshake, agent)
            self.reports.agent_came(node)
            self._count_follower(node, agent.heard_at)
            message = await reading
            while message is not None:
                agent.heard(now := time.monotonic())
                self.lost_nodes.notice_pause(now)
                if self.members.agents.get(node) is agent:
                    self._read(node, agent, message)
                message = await wire.read(reader)
        finally:
            if self.members.agents.get(node) is agent:
                self.lost_nodes.line_ended(node, "the connection to its agent closed")

    async def free_number(self, wanted: int, listens: Address | None) -> int | None:
        """Return a free node number, if possible `wanted`, for a node that will listen at `listens`. Returns None if
        all numbers are in use.

        If no number is free, wait until the agent with number `wanted` sends a message or is lost, and try again.
        """
        if (free := self.admission.free_number(wanted, listens, time.monotonic())) is not None:
            return free
        if (former := self.members.agents.get(wanted)) is not None:
            # if the node with the number `wanted` is lost, but its loss is not detected yet, wait for the detection
            await former.confirmed()
        return self.admission.free_number(wanted, listens, time.monotonic())

    def _read(self, node: int, agent: Agent, message: wire.Message) -> None:
        """Decode and process one message of an agent. An invalid message is logged and skipped."""
        try:
            self.take(node, agent, c.AGENT_REPORTS.decode(message))
        except wire.WireError as error:
            sys.stderr.write(f"the coordinator refused a message of node {node}: {error}\n")

    def take(self, node: int, agent: Agent, report: c.FromAgent) -> None:
        """Process one message of an agent, which is mostly a report of one of the agent's workers."""
        match report:
            case c.Beat(clock=clock):
                self._sync_clock(node, clock)
                if clock is not None:
                    self._count_follower(node, clock + self._clocks.behind(node))
                self._outbox.send(node, c.Heard(heard=agent.events))
                return
            case c.Acknowledged(number=number):
                self.members.acknowledged(node, number)
                self._release_nodes()
                return
            case c.AskJobState():
                self._outbox.share_again(node)
                return
            case c.Event() if not self.members.stepped_down:
                agent.events += 1
            case c.LastSnapshots(held=held):
                self.end.holds(node, held)
            case c.Uploaded():
                self.end.uploaded(node)
        if (self.ended.done() and not isinstance(report, c.Event)) or self.members.stepped_down:
            return  # after the end of the job, process only events
        translated = self._clocks.translated(node, report)
        if not isinstance(report, c.NodeJoin):
            self.reports.take(node, translated)
            return
        with self.events.together():
            # write all event lines of the node's ranks in one go
            self.reports.take(node, translated)

    def _sync_clock(self, node: int, clock: float | None) -> None:
        if clock is not None:
            self._clocks.heard(node, clock, time.monotonic())

    def _count_follower(self, node: int, sent_at: float) -> None:
        """Record that `node` still follows this coordinator. `sent_at`: time at which the node sent its message, on the
        monotonic clock of this machine."""
        if self.members.unsure_since is not None:
            self.members.follows(node, sent_at)
            if self.members.unsure_since is None:
                self.end.is_sure()

    # --- resizes ----------------------------------------------------------------------------------

    async def _look_for_orders(self, accepted: set[str]) -> None:
        """Look for order files (orders to resize the job or to move ranks), and carry them out, oldest first.
        `accepted`: names of orders to skip, such as orders of an earlier run; newly accepted orders are added to this
        set."""
        if not self._takes_orders:
            return
        while not self.lost_nodes.is_over:
            await asyncio.sleep(_ORDERS_S)
            if self.membership.phase is not JobPhase.RUNNING:
                continue
            orders = read_orders(self._run.run_dir)
            for name, order in orders_due(orders, accepted, self.members.members):
                accepted.add(name)
                if isinstance(order, MoveOrder):
                    self.actions.carry_out(self.membership.move(order.node, name))
                else:
                    self.actions.carry_out(self.membership.resize(order.nodes, name))
            for name, order in orders_overtaken(orders, accepted):
                accepted.add(name)
                nodes = self.membership.size if isinstance(order, MoveOrder) else order.nodes
                self._log("resize_refused", order=name, nodes=nodes, why=OVERTAKEN)

    @property
    def _takes_orders(self) -> bool:
        """Whether the job can carry out orders, because it is elastic or has spare nodes."""
        return self._run.config.elastic is not None or self._run.config.spares > 0

    def _release_nodes(self) -> None:
        """Release nodes that are no longer members, once all agents that may become coordinator know the new
        members."""
        if self.end.ended.done() or not (nodes := self.members.released()):
            return
        for node in sorted(nodes - {self._run.node}):
            self._outbox.send(node, c.Released())
            self.members.agents.pop(node)
        if self._run.node in nodes:
            self.lost_nodes.step_down(cause="it has left the job")
            self._outbox.send(self._run.node, c.Released())
            self._hang_up_on_others()
            return
        # continue a resize that may have waited for the numbers of the released nodes
        self.actions.carry_out(self.membership.reconcile())

    def _hang_up_on_others(self) -> None:
        """Close the connections of all other agents, so that they elect another coordinator at once. Called when this
        coordinator's node has left the job. If the connections stayed open while this node finishes its uploads, no
        coordinator would handle faults of the other nodes."""
        for node, agent in self.members.agents.items():
            if node != self._run.node:
                agent.writer.close()

    async def _watch(self) -> None:
        """Check periodically for nodes that send no messages, and for ranks that do not join a generation in time."""
        lost_nodes = self.lost_nodes
        while not lost_nodes.is_over:
            lost_nodes.ran_at = time.monotonic()
            await asyncio.sleep(self._run.config.restart.lease_s / LOOKS)
            now = time.monotonic()
            lost_nodes.look(now)
            self.reports.late_ranks(now)


def _continues(config: RuntimeConfig) -> bool:
    """Return whether the remaining ranks continue to train while lost ranks are replaced."""
    return config.restart.policy == "continue"


def _scale(config: RuntimeConfig) -> Scale:
    """Return the numbers of nodes with which the job may run."""
    return Scale.of(config.elastic, config.nodes, config.workers_per_node, config.global_batch_size)
