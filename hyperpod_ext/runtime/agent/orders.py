"""Carries out the orders of the coordinator and of the HyperPod operator on a node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from functools import partial
from typing import Any

from hyperpod_ext.runtime.agent.coordinator_client import CoordinatorClient
from hyperpod_ext.runtime.agent.copies import LastStep
from hyperpod_ext.runtime.agent.memory_client import held_at_last
from hyperpod_ext.runtime.agent.reports import NodeReports
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.agent.supervisors import ForkSupervisor, MemorySupervisor
from hyperpod_ext.runtime.agent.workers import Start, Workers
from hyperpod_ext.runtime.detection.health import HealthContext, examine_until_fit
from hyperpod_ext.runtime.detection.preflight import check_tiers
from hyperpod_ext.runtime.fault_injection.from_agent import inject_node_fault
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.memory_server.protocol import requests as r


class Orders:
    """Carries out the orders that the coordinator sends to this node, and passes orders for workers on to the
    workers."""

    def __init__(
        self,
        settings: NodeSettings,
        client: CoordinatorClient,
        workers: Workers,
        memory: MemorySupervisor,
        forks: ForkSupervisor,
        last_step: LastStep,
        reports: NodeReports,
    ) -> None:
        self._settings, self._config = settings, settings.config
        self._client, self._workers, self._memory, self._forks = client, workers, memory, forks
        self._last_step, self._reports, self._ask = last_step, reports, memory.client.ask
        self._news: c.JobNews | None = None
        self._own_ranks: Collection[int] = ()
        self._peers = r.Peers(peers={}, domains={})
        """Newest received addresses of the memory servers with which this node exchanges copies."""
        self._restored_from: dict[str, Any] = {}
        """Name of the job's run, and URLs of the durable tiers that have the step from which the current generation
        continues."""

    @property
    def ranks(self) -> set[int]:
        """Ranks that are assigned to this node or have a process on it."""
        return {*self._own_ranks, *self._workers.ranks}

    async def follow(self, order: c.ToAgent) -> None:
        """Carry out one order of the coordinator."""
        match order:
            case c.JobNews():
                await self._take_note(order)
            case c.NodeAssignment():
                self._own_ranks = order.ranks
                await self._set_peers(order)
            case c.StartWorker(rank=rank):
                self._reports.spawn(self._start(self._workers.expect(rank)))
            case c.PrepareWorker(rank=rank, world_size=world_size):
                self._reports.spawn(self._start(self._workers.expect(rank, world_size)))
            case c.EndWorkers():
                if self._own_ranks:
                    self._workers.end_joining()
                else:
                    self._workers.kill_all()
            case c.MembersReleased(world_size=world_size):
                await self._ask(r.ReleaseDeparted(ranks=tuple(self._workers.ranks), world_size=world_size))
            case c.DecommissionNode():
                self._reports.spawn(self._decommission())
            case c.ScheduleSave(kind=kind, step=step):
                await self._ask(r.ScheduleCopy(kind=kind, step=step))
            case c.AskDurableTiers(exclude=exclude):
                # in the background, because an abort must not wait for slow storage
                self._reports.spawn(self._report_durable(exclude))
            case c.AskHeartbeats():
                self._workers.monitor.answer()
            case c.AskAlive(generation=generation):
                # send no answer if a worker has died, because a `Died` report follows
                if self._workers.all_live():
                    self._reports.tell(c.Alive(generation=generation))
            case c.EndHung(rank=rank, cause=cause):
                self._workers.monitor.end(rank, cause)
            case c.SaveLast():
                self._reports.spawn(self.save_last(self._config.checkpoint.finish_s))
            case c.UploadSnapshot(save_id=save_id):
                self._last_step.name(save_id)
            case c.Heard() | c.JobState() | c.JobStateChange() | c.StopNode() | c.EndJob() | c.Released():
                pass  # `CoordinatorClient` or `Node` has already handled these orders
            case _:
                await self._lead_workers(order)

    async def save_last(self, limit_s: float) -> None:
        """Kill all workers, then upload the newest step to the durable tiers for at most `limit_s` seconds."""
        ranks = self.ranks
        self._workers.kill_all()  # from now on, no process writes snapshots
        await self._last_step.upload(ranks, limit_s)

    async def _lead_workers(self, order: c.ToWorker) -> None:
        """Pass `order` on to the workers. An abort is passed on at once, because ranks are waiting in collectives. Any
        other order is passed on after the memory server has processed the requests that belong to the order."""
        match order:
            case c.AbortGeneration():
                self._workers.leave(order)
                if self._config.restarts_script:
                    self._start_all_again()
                return
            case c.BeginGeneration() | c.TryNext():
                await self._begin(order)
            case c.GoOn(step=step):
                # drop snapshots of later steps only now, because they could be needed until all ranks had restored
                # `step`
                generation = self._workers.generation
                await self._ask(r.Fence(generation=generation, step=step, **self._restored_from))
                if self._config.restart.warm_spares:
                    self._forks.keep_warm()
            case c.FinishTraining():
                self._workers.finishing = True
        self._workers.send(order)

    def _start_all_again(self) -> None:
        """Replace all worker processes of this node. Called only for jobs whose script restores its own state when it
        starts."""
        for rank in self._own_ranks:
            self._reports.spawn(self._start(self._workers.expect(rank)))

    async def _begin(self, order: c.BeginGeneration | c.TryNext) -> None:
        # use the number in the order: a run's first generation has a higher number than all generations of earlier runs
        self._workers.generation = order.generation
        self._restored_from = {"run": order.run, "stored": order.decision.stored}
        if isinstance(order, c.BeginGeneration):
            self._workers.keep_only(self._own_ranks)
        # fence only now, because at the abort, saves of departed or dead ranks were still being written
        await self._ask(r.Fence(generation=self._workers.generation, run=order.run))
        if isinstance(order, c.BeginGeneration):
            await self._ask(r.PeerSchedule(step=order.peer_step))
        if self._config.elastic is not None or self._config.restart.policy == "continue":
            nodes = self._news.nodes if self._news is not None else self._config.nodes
            owners = len(self._own_ranks) or self._config.workers_per_node
            await self._ask(r.Rescale(nodes=nodes, owners=owners))

    async def _take_note(self, news: c.JobNews) -> None:
        if self._news is None:
            self._workers.master_port = news.master_port
            self._forks.fork_after(self._prepare())
        self._news = news
        self._workers.learn(news.faults)
        self._workers.world_size = news.world_size
        self._memory.has_spare = news.spares
        if not self._workers.ranks:
            self._workers.moved_in = news.moved_in
        await self._set_peers(self._peers)

    async def _set_peers(self, now: c.NodeAssignment | r.Peers) -> None:
        """Send the addresses of peers to this node's memory server if they have changed. A node without ranks keeps its
        former peers."""
        before, lost = self._peers, self._news.servers_lost if self._news is not None else 0
        self._peers = r.Peers(peers=now.peers, domains=now.domains, servers_lost=lost, group=now.group)
        if now.peers and self._peers != before:
            await self._ask(self._peers)

    async def _prepare(self) -> None:
        """Prepare this node before its first worker starts."""
        checking = asyncio.to_thread(check_tiers, self._config) if self._settings.node == 0 else asyncio.sleep(0)
        await asyncio.gather(self._forks.wait_imported(), checking)
        monitor = self._workers.monitor
        monitor.on_node_fault = lambda fault: inject_node_fault(fault, self._client.disconnect)
        self._reports.spawn(monitor.run())
        if self._config.checkpoint.durable() or self._config.checkpoint.peer():
            self._reports.spawn(self._last_step.copies.watch())

    async def _start(self, start: Start) -> None:
        """Start a worker if this node passes the health checks, otherwise report that the node has failed."""
        await self._forks.ready()
        begun = self._workers.generation > 1 or start.world_size is not None
        address = self._client.own_address
        health = await examine_until_fit(HealthContext(self._config, self._settings.run_dir, address, begun=begun))
        if health.unhealthy:
            self._reports.event("unhealthy", problems=health.unhealthy, seconds=health.seconds)
            self._reports.fail(f"it cannot run a worker: {health.sentence()}", lost=True)
            return
        await self._forks.fork(partial(self._workers.start, start))

    async def _decommission(self) -> None:
        """Kill all workers, whose ranks are now on other nodes, and report the snapshots in this node's memory."""
        ranks = self._workers.ranks
        self._workers.kill_all()
        held, pieces = await held_at_last(self._memory.client, ranks)
        self._reports.tell(c.Decommissioned(held=held, pieces=pieces))

    async def _report_durable(self, exclude: tuple[tuple[str, str], ...]) -> None:
        found = await self._ask(r.Durable(exclude=exclude))
        answer = c.DurableAnswer(
            checkpoints=tuple(c.DurableCheckpoint.model_validate(one) for one in found.checkpoints),
            newest_generation=found.generation,
            problems=found.problems,
            unreachable=found.unreachable,
            exclude=exclude,
        )
        self._reports.tell(answer)


class Operator:
    """Carries out the orders of the HyperPod operator for this node, and passes the newest order on to each new
    coordinator."""

    def __init__(
        self, client: CoordinatorClient, workers: Workers, memory: MemorySupervisor, reports: NodeReports
    ) -> None:
        self._client, self._workers, self._memory, self._reports = client, workers, memory, reports
        self._order: c.HoldTraining | c.ResumeTraining | None = None
        self._resumed_in = -1
        """Term of the coordinator that has received the order to resume; -1 if no coordinator has received it."""
        self._limit: asyncio.TimerHandle | None = None
        """Timer that kills ranks that have not left their step; None if no timer is set."""

    def hold(self, limit_s: float | None = None) -> None:
        """Pause training of the whole job until `resume`. Processes and snapshots in memory are kept.

        Args:
            limit_s: number of seconds after which ranks of this node that have not left their step are killed.
                `limit_s` is None if the pause is requested because of a fault. A pause because of a fault has the time
                limit `restart.leave_timeout_s`, and is ignored by a job that can train without the missing ranks.
        """
        self._order = c.HoldTraining(for_fault=limit_s is None)
        self._reports.tell(self._order)
        if limit_s is not None and self._limit is None:
            why = f"did not leave its step within {limit_s:g} s, when the operator stopped the job"
            self._limit = asyncio.get_running_loop().call_later(limit_s, self._workers.end_trainers, why)

    async def held(self, limit_s: float) -> None:
        """Wait until all ranks of this node have left their step and their snapshots are copied to the other tiers, for
        at most `limit_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._workers.all_wait()
                await self._memory.client.ask(r.WaitIdle(timeout_s=limit_s))

    def resume(self, nodes: int, gone: Collection[str] = ()) -> None:
        """End the pause of training that this node has requested. `nodes`: number of nodes with which an elastic job
        continues. `gone`: hosts of nodes that have left the job."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        news = self._client.news
        self._order = c.ResumeTraining(nodes=nodes, gone=tuple(sorted(gone)))
        self._resumed_in = news.term if news is not None and self._client.has_coordinator else -1
        self._client.know_gone(gone, replaced=news is None or nodes >= news.nodes)
        self._reports.tell(self._order)

    def repeat(self, message: c.ToAgent | c.FromAgent) -> None:
        """Send the operator's newest order again if `message` comes from a coordinator that may not have received the
        order."""
        if not isinstance(message, c.JobNews) or self._order is None:
            return
        if isinstance(self._order, c.ResumeTraining):
            if message.term == self._resumed_in:
                return
            self._resumed_in = message.term
        self._reports.tell(self._order)

    @property
    def waits_for(self) -> str:
        """Sentence that explains why this node waits; empty if it does not wait."""
        return self._client.waits_for

    def log_call(self, **fields: Any) -> None:
        """Write an event about a request of the operator. `fields`: fields of the event."""
        self._reports.event("operator_asked", **fields)
