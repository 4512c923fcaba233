"""One node: its memory server, its fork server, its workers, and the connection to the coordinator; it may have
to become that."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.runtime import ENV_RUNTIME
from hyperpod_ext.errors import ConflictError, HyperpodExtError, JobFailedError
from hyperpod_ext.files import make_private_folder, write_atomically
from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import become_subreaper, describe_exit, kill_descendants, process_state
from hyperpod_ext.runtime.agent.children import (
    ForkServer,
    ForkServerEndedError,
    ForkServerProcess,
    MemoryServer,
    MemoryServerProcess,
    Prepared,
    on_exit,
)
from hyperpod_ext.runtime.agent.coordinator_client import CoordinatorClient
from hyperpod_ext.runtime.agent.election import ElectionListener, places_for
from hyperpod_ext.runtime.agent.last_step import LastStep
from hyperpod_ext.runtime.agent.memory_client import AsyncMemoryClient, CopyMonitor
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.agent.workers import Workers, held_pieces, held_snapshots
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.detection import preemption as notices
from hyperpod_ext.runtime.detection.failure_causes import OomKills, decode_exit
from hyperpod_ext.runtime.detection.health import HealthContext, examine_until_fit
from hyperpod_ext.runtime.detection.preflight import check_tiers
from hyperpod_ext.runtime.events.kept import LogUpload
from hyperpod_ext.runtime.fault_injection.from_agent import inject_node_fault
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.environment import (
    ENV_AGENT_SOCKET,
    ENV_FAILURE_DOMAIN,
    ENV_MEMORY_SOCKET,
    ENV_SECRET_FILE,
)
from hyperpod_ext.runtime.ipc.interface import address_of
from hyperpod_ext.runtime.ipc.listener import Listener
from hyperpod_ext.runtime.log_rules.rules import LogRule, LogRules, of_spec
from hyperpod_ext.runtime.log_rules.watch import LogWatch
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.storage.open import open_tier

__all__ = ["Node", "NodeSettings"]

_WHERE = "coordinator.json"
_COORDINATOR_LOST = "the coordinator is gone"
_FAILED = JobFailedError.__name__
_MEMORY_SILENT_S = 15.0
"""How long a memory server may be silent that is asked something it can answer at once."""
_SOCKET_S = 1.0
"""How often it is looked whether the agent's socket exists."""
_DIES_S = 2.0
"""How long the end of a process is waited for that was killed: one that waits for a disk ends when that answers."""
_LAST_WORD_S = 5.0
"""How long a node that cannot go on waits for the coordinator to end the job."""


class Node:
    """Runs one node of a job until the job ends."""

    def __init__(
        self,
        settings: NodeSettings,
        watch: Callable[[c.ToAgent | c.FromAgent], None] | None = None,
        log_rules: Sequence[LogRule] = (),
        prepared: Prepared | None = None,
    ) -> None:
        self._settings, self._watch, self._prepared = settings, watch, prepared
        log, rules = (
            settings.run_dir / "logs" / "rank0.log",
            LogRules([*of_spec(settings.config.log_rules), *log_rules]),
        )
        self._log_watch = LogWatch(rules, log, self._end_rank_0, lambda: 0 in {*self._own_ranks, *self._workers.ranks})
        self._config = settings.config
        self._agent_socket = settings.socket_dir / f"node{settings.node}.agent"
        self._memory_socket = settings.socket_dir / f"node{settings.node}.memory"
        self._next_memory_socket = settings.socket_dir / f"node{settings.node}.next"
        limit_s = min(_MEMORY_SILENT_S, self._config.restart.hang.floor_s / 2)  # before its ranks count as hanging
        self._memory = AsyncMemoryClient(self._memory_socket, self._memory_silent, limit_s)
        self._copies = CopyMonitor(self._memory.ask, self._event, self._break)
        self._last_step = LastStep(self._memory.ask, self._tell, self._event)
        self._workers = Workers(settings, self._memory, tell=self._tell, event=self._event, spawn=self._spawn)
        self._nodes_in_use = self._config.nodes
        self._own_ranks: set[int] = set()
        self.asked_to_leave = False
        self._assignment = c.NodeAssignment(ranks=(), peers={}, domains={})
        """What this node has, and who holds its copies."""
        self._servers_lost = 0
        """Memory servers of the job that were lost so far."""
        self._beginning: dict[str, Any] = {}
        """Of the decision that ranks restore: the job's run, and the durable tiers that have it."""
        self._known: dict[str, Any] = {}
        """What every member is told of this node."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._coordinator: Coordinator | None = None
        self._others = itertools.cycle(settings.others)
        self._log_upload: LogUpload | None = None
        self._ready: asyncio.Task[None] | None = None
        self._over = False
        """Whether the job is, or goes on without this node."""
        self._hold: c.HoldTraining | None = None
        """What was said when somebody wanted no rank to train."""
        self._resumed: c.ResumeTraining | None = None
        """What was said when ranks were to train again; another coordinator is told, too."""
        self._resumed_in = -1
        """Term of the coordinator that was told."""
        self._hold_ends: asyncio.TimerHandle | None = None
        """Until then ranks may leave their step."""
        self._memory_server: MemoryServer | None = None
        self._memory_ends: list[int] = []
        """Steps in which a memory server of this node has ended."""
        self._forks_lost: list[int] = []
        """Steps in which a fork server of this node has ended, and another one was started."""
        self._fork_server_changed = asyncio.Condition()
        self._oom_kills = OomKills()
        self._listener = Listener(self._workers.serve, self._break)
        places = places_for(self._config.most_nodes + self._config.spares)
        self._election = ElectionListener(
            settings.secret,
            self._coordinator_broke,
            places,
            encrypted=self._config.encrypted,
            has_coordinator=lambda: self._coordinator_client.has_coordinator,
            news=lambda: self._coordinator_client.news,
            begun_anew=lambda host: self._coordinator_client.know_gone([host], replaced=True),
        )
        self._coordinator_client = CoordinatorClient(settings, self._election, self._who, self._take_over)

    why_failed = "", ""
    """Why the job has failed, and what to do, as this node was told."""

    async def run(self) -> str:
        """Returns the job's final state: succeeded, failed or cancelled; or left, if the job goes on without this node.

        Raises:
            JobFailedError: this node could not go on; the job's report says the same.
        """
        become_subreaper()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.ask_to_end)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._cancel)
        try:
            return await self._run()
        finally:
            # nothing of this node outlives its agent; its memory goes with the memory server
            kill_descendants(os.getpid())
            self._agent_socket.unlink(missing_ok=True)
            self._memory_socket.unlink(missing_ok=True)
            self._next_memory_socket.unlink(missing_ok=True)

    async def _run(self) -> str:
        settings = self._settings
        if interface := self._config.interface:
            address_of(interface)  # before anything is started
        if settings.node == 0 and not settings.rejoin:
            await self._coordinate_first()
        self._memory_socket.unlink(missing_ok=True)  # of an agent that was killed
        prepared = self._prepared
        await self._take_fork_server(prepared.fork_server if prepared else self._start_fork_server())
        self._start_memory_server(self._memory_socket, prepared.memory_server if prepared else None)
        await self._listener.listen_unix(self._agent_socket)
        await self._coordinator_client.connect(self._endpoint, self._why_broken)
        address = address_of(interface) if interface else self._coordinator_client.own_address
        if self._coordinator is None:
            await self._listen_for_agents(*(settings.listen or (address, 0)))
        self._known = {
            "node": settings.node,
            "pid": os.getpid(),
            "peer": (address, (await self._memory.ask(r.Listen(host=address))).port),
            "address": self._election.address,
            "domain": os.environ.get(ENV_FAILURE_DOMAIN, ""),
        }
        self._coordinator_client.send_handshake()
        self._spawn(self._memory.watch())
        self._spawn(self._watch_socket())
        if self._log_watch.has_rules:
            self._spawn(self._log_watch.run())
        self._event("network", interface=interface, address=address)
        if self._config.elastic is not None:
            preemption = self._config.elastic.notices
            self._spawn(
                notices.watch(preemption, notices.metadata_of(preemption), self._take_notice, self._hears_nothing)
            )
        try:
            return await self._obey()
        finally:
            kill_descendants(os.getpid())
            await self._listener.close()
            await self._coordinator_client.close()
            await self._election.close()
            if self._coordinator is not None:
                await self._coordinator.close()
            if self._log_upload is not None:
                await asyncio.to_thread(self._log_upload.close)

    # --- who is told by somebody else than the coordinator ----------------------------------------

    def hold(self, limit_s: float | None = None) -> None:
        """Have no rank of the job train until `resume`; processes and memory stay.

        Args:
            limit_s: ranks here that have not left their step by then are ended; None: this is for a fault, in which
                `restart.leave_timeout_s` counts, and a job that goes on without what was lost does not stop.
        """
        self._hold = c.HoldTraining(for_fault=limit_s is None)
        self._tell(self._hold)
        if limit_s is not None and self._hold_ends is None:
            why = f"did not leave its step within {limit_s:g} s, when the operator stopped the job"
            self._hold_ends = asyncio.get_running_loop().call_later(limit_s, self._workers.end_trainers, why)

    async def held(self, limit_s: float) -> None:
        """Returns when ranks here wait, and what is due of their state has arrived elsewhere, or after `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._workers.all_wait()
                await self._memory.ask(r.WaitIdle(timeout_s=limit_s))

    def resume(self, nodes: int, gone: Collection[str] = ()) -> None:
        """Let ranks train again, on `nodes` nodes if the job is elastic. Those at the addresses `gone` are none of them
        any more."""
        self._hold = None
        if self._hold_ends is not None:
            self._hold_ends.cancel()
            self._hold_ends = None
        self._resumed = c.ResumeTraining(nodes=nodes, gone=tuple(sorted(gone)))
        self._resumed_in = self._term if self._coordinator_client.has_coordinator else -1
        self._coordinator_client.know_gone(gone, replaced=nodes >= self._nodes_in_use)
        self._tell(self._resumed)

    @property
    def waits_for(self) -> str:
        """What keeps this node from going on, in words; empty: nothing."""
        return self._coordinator_client.waits_for

    def operator_asked(self, call: str, caller: str, status: int, why: str, state: str) -> None:
        """For the job's event log: somebody has called the pod as AWS's operator does."""
        self._event("operator_asked", call=call, caller=caller, status=status, why=why, state=state)

    @property
    def _term(self) -> int:
        news = self._coordinator_client.news
        return news.term if news is not None else -1

    def _end_rank_0(self, cause: str) -> None:
        """It broke a rule on what it prints: a fault of the rank, as any other."""
        self._workers.monitor.end(0, cause, "log-rule")

    # --- who coordinates ------------------------------------------------------------------------

    async def _coordinate_first(self) -> None:
        """The first node's agent coordinates until it is lost.

        Raises:
            ConflictError: the port is taken.
        """
        host, port = self._settings.host, self._settings.port
        await self._listen_for_agents(host, port)
        first = Coordinator.first(self._config, self._settings.node, self._settings.run_dir, free_port(host))
        self._coordinate(first)

    async def _listen_for_agents(self, host: str, port: int) -> None:
        try:
            await self._election.open(host, port)
        except OSError as error:
            raise ConflictError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                hint="Set rendezvous.port to a free port, or to 0 where the target can choose one.",
            ) from error

    def _take_over(self, own: c.AgentHandshake, votes: list[c.AgentHandshake], gone: frozenset[int]) -> None:
        settings = self._settings
        self._coordinate(Coordinator.successor(self._config, settings.node, settings.run_dir, own, votes, gone))

    def _coordinate(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._election.lead_to(coordinator)
        coordinator.show()
        self._show_where()
        if self._settings.keep_events and (shared := self._config.checkpoint.shared()):
            place = partial(open_tier, shared[0], self._config.name)
            self._log_upload = LogUpload(coordinator.events.path, place, self._settings.node)

    def _show_where(self) -> None:
        """To agents that come late. Where that cannot be written, they alone do not find the coordinator."""
        run_dir = self._settings.run_dir
        try:
            write_atomically(run_dir / _WHERE, json.dumps({"address": self._election.address}) + "\n")
        except OSError as error:
            sys.stderr.write(f"hyperpod_ext: {run_dir / _WHERE} cannot be written: {error}\n")

    def _endpoint(self) -> tuple[str, int]:
        """Where the coordinator is; who comes late finds that in the run directory, where it is shared."""
        settings = self._settings
        if settings.others:
            return next(self._others)
        if settings.rejoin:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # it is missing, or was cut off
                host, port = json.loads((settings.run_dir / _WHERE).read_text())["address"]
                return str(host), int(port)
        return settings.host, settings.port

    def _coordinator_broke(self, why: str) -> None:
        if self._coordinator is not None:
            self._coordinator.broke(why)

    def _who(self, own_id: str, term: int, job_state: wire.Message | None) -> c.AgentHandshake:
        """What a coordinator is told first."""
        known = {**self._known, **self._workers.summary(), "term": term, "job_state": job_state}
        return c.AgentHandshake(id=own_id, leaving=self.asked_to_leave, clock=time.monotonic(), **known)

    # --- what the coordinator says --------------------------------------------------------------

    async def _obey(self) -> str:
        while (order := await self._next_order()) is not None:
            self._log_watch.hear(order)
            if self._watch is not None:
                self._watch(order)
            if isinstance(order, c.EndJob):
                self._over, self.why_failed = True, (order.why, order.hint)
                if order.state != "succeeded":
                    await self._save_what_there_is(order.grace_s)
                return order.state
            if isinstance(order, c.Released):
                self._over = True
                await self._hand_over()
                return "left"
            await self._follow(order)
        raise JobFailedError(f"node {self._settings.node}: {_COORDINATOR_LOST}")

    async def _next_order(self) -> c.ToAgent | None:
        """Next message of the coordinator, None when it is gone; raises when this node cannot go on."""
        reading = asyncio.ensure_future(self._coordinator_client.next())
        waited: set[asyncio.Future[Any]] = {reading, self._broken}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            reading.cancel()
            raise JobFailedError(f"node {self._settings.node}: {self._broken.result()}")
        return reading.result()

    async def _save_last(self, limit_s: float) -> None:
        """Nobody trains any more: see the newest step to the durable tiers while there is a memory server."""
        ranks = {*self._own_ranks, *self._workers.ranks}
        self._workers.kill_all()  # from here on nobody writes to the slots
        self._last_step = LastStep(self._memory.ask, self._tell, self._event)
        # what was asked for last may not be sealed yet
        await self._last_step.bring(lambda: self._held_at_last(ranks), limit_s)
        await self._copies.tell()
        self._tell(c.Uploaded())

    async def _save_what_there_is(self, grace_s: float) -> None:
        """The job has ended before its last step: within its grace, the newest that there is."""
        if not self._config.checkpoint.durable():
            return
        listening = asyncio.ensure_future(self._hear_to_the_end())
        with contextlib.suppress(OSError, TimeoutError, JobFailedError):  # then older checkpoints have to do
            async with asyncio.timeout(grace_s + _LAST_WORD_S):
                await self._save_last(grace_s)
                if self._coordinator is not None:  # which the others tell what has become of their parts
                    await self._coordinator.all_uploaded.wait()
        listening.cancel()

    async def _hear_to_the_end(self) -> None:
        """What the coordinator says when the job has ended; a line that nobody reads is cut."""
        with contextlib.suppress(JobFailedError):
            while (order := await self._coordinator_client.next()) is not None:
                if isinstance(order, c.UploadSnapshot):
                    self._last_step.name(order.save_id)
        self._last_step.name("")  # nobody is there to say what all have

    async def _hand_over(self) -> None:
        """The job goes on without this node: what of older checkpoints is due here still arrives."""
        if self._config.checkpoint.durable():
            await self._memory.ask(r.WaitIdle(timeout_s=self._config.checkpoint.grace_s))
            await self._copies.tell()

    async def _held_at_last(self, ranks: Collection[int]) -> tuple[c.HeldSnapshot, ...]:
        """Snapshots in this node's memory, once all that `ranks`, which are ended, had asked for is done."""
        if self._memory.ended:
            return ()
        for rank in ranks:
            await self._memory.ask(r.Held(owner=rank, pid=os.getpid()))
        return held_snapshots((await self._memory.ask(r.Held())).snapshots)

    async def _pieces_at_last(self) -> tuple[c.HeldPiece, ...]:
        """Parity in this node's memory."""
        return () if self._memory.ended else held_pieces((await self._memory.ask(r.Held())).pieces)

    async def _follow(self, order: c.ToAgent) -> None:
        """Carry out what the coordinator says; what is for workers is passed on."""
        match order:
            case c.JobNews():
                await self._take_note(order)
            case c.NodeAssignment():
                await self._take_over_ranks(order)
            case c.StartWorker(rank=rank):
                self._start_worker(rank)
            case c.PrepareWorker(rank=rank, world_size=world_size):
                self._start_worker(rank, world_size)
            case c.EndWorkers():
                if self._own_ranks:
                    self._workers.end_joining()
                else:
                    self._workers.kill_all()
            case c.MembersReleased(world_size=world_size):
                ranks = tuple(self._workers.ranks)
                await self._memory.ask(r.ReleaseDeparted(ranks=ranks, world_size=world_size))
            case c.DecommissionNode():
                self._spawn(self._decommission())
            case c.ScheduleSave(kind=kind, step=step):
                await self._memory.ask(r.ScheduleCopy(kind=kind, step=step))
            case c.AskDurableTiers(exclude=exclude):
                # a store may take its time, and an abort may not wait for it
                self._spawn(self._look_at_durable(exclude))
            case c.AskHeartbeats():
                self._workers.monitor.answer()
            case c.AskAlive(generation=generation):
                if self._workers.all_live():  # else the news of a death is on its way, and says more
                    self._tell(c.Alive(generation=generation))
            case c.EndHung(rank=rank, cause=cause):
                self._workers.monitor.end(rank, cause)
            case c.SaveLast():
                self._spawn(self._save_last(self._config.checkpoint.finish_s))
            case c.UploadSnapshot(save_id=save_id):
                self._last_step.name(save_id)
            case c.Heard() | c.JobState() | c.JobStateChange() | c.StopNode() | c.EndJob() | c.Released():
                pass  # the client of the coordinator and `_obey` have read these
            case _:
                await self._lead_workers(order)

    async def _lead_workers(self, order: c.ToWorker) -> None:
        """What the ranks of a generation are to do; the memory server hears of it first."""
        match order:
            case c.AbortGeneration():
                self._workers.leave(order)  # first of all: survivors are waiting in their collectives
                return
            case c.BeginGeneration() | c.TryNext():
                await self._begin(order)
            case c.GoOn(step=step):
                # until now, when everybody has this step, a newer one might have been needed yet
                generation = self._workers.generation
                await self._memory.ask(r.Fence(generation=generation, step=step, **self._beginning))
                if self._config.restart.warm_spares:
                    self._spawn(self._fork_server.keep_warm(range(self._config.workers_per_node)))
            case c.FinishTraining():
                self._workers.finishing = True
        self._workers.send(order)

    async def _begin(self, order: c.BeginGeneration | c.TryNext) -> None:
        self._workers.generation = order.generation  # the first one follows those of earlier runs
        self._beginning = {"run": order.run, "stored": order.decision.stored}
        # not at the abort: what ranks saved before they left, or died, is still on its way then
        if isinstance(order, c.BeginGeneration):
            self._workers.keep_only(self._own_ranks)
        await self._memory.ask(r.Fence(generation=self._workers.generation, run=order.run))
        if isinstance(order, c.BeginGeneration):
            await self._memory.ask(r.PeerSchedule(step=order.peer_step))
        if self._config.elastic is not None or self._config.restart.policy == "continue":
            owners = len(self._own_ranks) or self._config.workers_per_node
            await self._memory.ask(r.Rescale(nodes=self._nodes_in_use, owners=owners))

    async def _take_note(self, news: c.JobNews) -> None:
        """The job has other nodes than before, or this one is in it now."""
        if self._ready is None:
            self._workers.master_port = news.master_port
            self._ready = asyncio.create_task(self._prepare())
        self._workers.learn(news.faults)
        self._workers.world_size, self._nodes_in_use = news.world_size, news.nodes
        if not self._workers.ranks:
            self._workers.moved_in = news.moved_in
        if self._hold is not None:  # another coordinator may not know
            self._tell(self._hold)
        elif self._resumed is not None and news.term != self._resumed_in:
            self._resumed_in = news.term
            self._tell(self._resumed)
        await self._know_peers(self._assignment, news.servers_lost)

    async def _take_over_ranks(self, assignment: c.NodeAssignment) -> None:
        """This node has other ranks than before, or other nodes hold its copies."""
        self._own_ranks = set(assignment.ranks)
        await self._know_peers(assignment, self._servers_lost)

    async def _know_peers(self, assignment: c.NodeAssignment, servers_lost: int) -> None:
        """Tell the memory server who the others are. One without ranks keeps those that it knew."""
        before = self._assignment.peers, self._assignment.group, self._servers_lost
        self._assignment, self._servers_lost = assignment, servers_lost
        if assignment.peers and (assignment.peers, assignment.group, servers_lost) != before:
            peers, domains, group = assignment.peers, assignment.domains, assignment.group
            await self._memory.ask(r.Peers(peers=peers, domains=domains, servers_lost=servers_lost, group=group))

    # --- workers --------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Everything that must be there before a worker is."""
        checking = asyncio.to_thread(check_tiers, self._config) if self._settings.node == 0 else asyncio.sleep(0)
        await asyncio.gather(self._import(), checking)
        self._workers.monitor.on_node_fault = lambda fault: inject_node_fault(
            fault, self._coordinator_client.disconnect
        )
        self._spawn(self._workers.monitor.run())
        if self._config.checkpoint.durable() or self._config.checkpoint.peer():
            self._spawn(self._copies.watch())

    def _start_worker(self, rank: int, next_world_size: int | None = None) -> None:
        """`next_world_size`: ranks of the world that it will be one of, while the others train in this one."""
        start = self._workers.expect(rank, joining=next_world_size is not None)
        self._spawn(self._start_once_fit(rank, start, next_world_size))

    async def _start_once_fit(self, rank: int, start: int, next_world_size: int | None) -> None:
        assert self._ready is not None, "the first news of the job come before the first order"
        await asyncio.shield(self._ready)
        begun = self._workers.generation > 1 or next_world_size is not None
        address = self._coordinator_client.own_address
        health = await examine_until_fit(HealthContext(self._config, self._settings.run_dir, address, begun=begun))
        if health.unhealthy:
            self._event("unhealthy", problems=health.unhealthy, seconds=health.seconds)
            self._lose(f"it is not fit for a worker: {health.sentence()}")
            return
        while True:
            lost = len(self._forks_lost)
            try:
                await asyncio.shield(self._ready)
                await self._mend_socket()
                await self._workers.start(rank, start, self._fork_server, next_world_size)
                return
            except ForkServerEndedError:
                async with self._fork_server_changed:
                    while len(self._forks_lost) == lost:
                        await self._fork_server_changed.wait()

    # --- the fork server ------------------------------------------------------------------------

    def _start_fork_server(self) -> ForkServerProcess:
        return ForkServerProcess.start(self._config.restart.preload, self._worker_environ())

    async def _take_fork_server(self, process: ForkServerProcess) -> None:
        environ = self._worker_environ()
        server = await ForkServer.of(
            process, {name: value for name, value in environ.items() if os.environ.get(name) != value}
        )
        self._fork_server = server
        on_exit(server.pid, lambda status: self._spawn(self._fork_server_ended(server, status)))

    async def _import(self) -> None:
        seconds = await self._fork_server.ready()
        for note in self._fork_server.notes:
            sys.stderr.write(f"hyperpod_ext: {note}\n")
        self._event("imported", seconds=seconds, notes=self._fork_server.notes)

    async def _fork_server_ended(self, server: ForkServer, status: int) -> None:
        """Start another one: the ranks here are no children of it, and train on."""
        cause, step = f"the process that forks workers {describe_exit(status)}", self._workers.newest_step
        if self._over or not server.is_ready:
            self._lose(cause)
            return
        if (why := self._why_no_more(self._forks_lost, step)) is not None:
            self._lose(cause + why)
            return
        self._event("fork_server_lost", cause=cause, step=step)
        await self._take_fork_server(self._start_fork_server())
        self._ready = asyncio.create_task(self._import())
        async with self._fork_server_changed:
            self._forks_lost.append(step)
            self._fork_server_changed.notify_all()

    async def _decommission(self) -> None:
        """Another node has this one's ranks; what its memory holds may still be needed."""
        ranks = self._workers.ranks
        self._workers.kill_all()
        self._tell(c.Decommissioned(held=await self._held_at_last(ranks), pieces=await self._pieces_at_last()))

    async def _look_at_durable(self, exclude: tuple[tuple[str, str], ...]) -> None:
        found = await self._memory.ask(r.Durable(exclude=exclude))
        checkpoints = tuple(c.DurableCheckpoint.model_validate(one) for one in found.checkpoints)
        answer = c.DurableAnswer(
            checkpoints=checkpoints,
            newest_generation=found.generation,
            problems=found.problems,
            unreachable=found.unreachable,
            exclude=exclude,
        )
        self._tell(answer)

    # --- the memory server ----------------------------------------------------------------------

    def _start_memory_server(self, socket_path: Path, process: MemoryServerProcess | None = None) -> None:
        make_private_folder(socket_path.parent)
        socket_path.unlink(missing_ok=True)
        number, environ = self._settings.node, self._worker_environ()
        server = self._memory_server = MemoryServer(socket_path, self._memory_socket, number, environ, process)
        on_exit(server.pid, lambda status: self._spawn(self._memory_server_ended(server, status)))

    def _memory_silent(self, why: str) -> None:
        """End a memory server that is stopped, or whose threads wait for a disk."""
        if (server := self._memory_server) is None or server.silent:
            return
        server.silent = f"{why} ({process_state(server.pid)}) and was killed"
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGKILL)
        self._spawn(self._bury(server))

    async def _bury(self, server: MemoryServer) -> None:
        """Go on without a memory server that SIGKILL does not end."""
        await asyncio.sleep(_DIES_S)
        await self._memory_server_ended(server, signal.SIGKILL)

    async def _memory_server_ended(self, server: MemoryServer, status: int) -> None:
        """Another one takes its place, if no other node does: training has not noticed, and what is saved next goes
        to that. What it held is lost."""
        if server.is_gone:
            return
        server.is_gone = True
        step, began = self._workers.newest_step, time.monotonic()
        how, words = server.silent or decode_exit(status, oom=self._oom_kills.since_last()).cause, ""
        if not server.silent:
            words = await server.last_log_line()
        cause = f"the memory server ended: {how}" + (f" ({words})" if words else "")
        if (why := self._why_no_other_memory(step)) is not None:
            self._memory.lost(cause)
            self._lose(cause + why)
            return
        self._memory_ends.append(step)
        self._memory.lost()
        self._event("memory_lost", cause=cause, step=step)
        self._start_memory_server(self._next_memory_socket)
        if answers := await self._memory.succeed(self._next_memory_socket):
            ports = [answer.port for answer in answers if isinstance(answer, r.PeerPort)]
            if ports and self._known:  # others send it anew what it is to hold for them
                self._known["peer"] = self._known["peer"][0], ports[0]
                self._tell(c.ServesPeers(peer=self._known["peer"]))
            self._event("memory_back", seconds=round(time.monotonic() - began, 4))

    def _why_no_other_memory(self, step: int) -> str | None:
        """None: another one is started. Else why not, if that is not plain."""
        news = self._coordinator_client.news
        if self._over or (news is not None and news.spares):
            return ""
        if self._workers.save_no_more and self._config.checkpoint.durable():
            return ", and with it what was on its way to a durable tier"
        return self._why_no_more(self._memory_ends, step)

    def _why_no_more(self, earlier: Sequence[int], step: int) -> str | None:
        """Why no process follows one that ends in `step`, as others did in the steps `earlier`; None: one does."""
        restart, in_a_row = self._config.restart, 1
        for at, after in itertools.pairwise([step, *reversed(earlier)]):
            if at - after >= restart.calm_steps:
                break
            in_a_row += 1
        if in_a_row > restart.max_on_node:
            return f"; {in_a_row} times in a row, the job goes on after {restart.max_on_node} (restart.max_on_node)"
        if (ends := len(earlier) + 1) > restart.max_restarts:
            return f"; {ends} times, the job goes on after {restart.max_restarts} (restart.max_restarts)"
        return None

    # --- the socket -----------------------------------------------------------------------------

    async def _watch_socket(self) -> None:
        while not self._over:
            await asyncio.sleep(_SOCKET_S)
            await self._mend_socket()

    async def _mend_socket(self) -> None:
        """Make the agent's socket again if somebody has removed it, as by cleaning the temporary directory. The memory
        server does the same for its own."""
        if not self._agent_socket.exists():
            sys.stderr.write(f"hyperpod_ext: {self._agent_socket} was removed, and is made again\n")
            make_private_folder(self._agent_socket.parent)
            await self._listener.listen_unix(self._agent_socket)

    # --- odds and ends --------------------------------------------------------------------------

    def _worker_environ(self) -> dict[str, str]:
        """Environment of the fork server, and so of every worker; libraries read some of it on import."""
        environ = {
            **os.environ,
            ENV_RUNTIME: self._config.model_dump_json(),
            ENV_SECRET_FILE: str(self._settings.secret_file),
            ENV_AGENT_SOCKET: str(self._agent_socket),
            ENV_MEMORY_SOCKET: str(self._memory_socket),
        }
        environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: many workers share the cores
        if interface := self._config.interface:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                environ.setdefault(variable, interface)
        elif self._settings.host in ("127.0.0.1", "::1", "localhost"):
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environ

    def _event(self, event: str, **fields: Any) -> None:
        t = fields.pop("t", None) or time.monotonic()
        self._tell(c.Event(event=event, t=t, fields={**fields, "node": self._settings.node}))

    def _tell(self, report: c.FromAgent) -> None:
        """To the coordinator. What a worker says that has joined no generation yet is of the one its agent is in."""
        if not report.generation:
            report = report.model_copy(update={"generation": self._workers.generation})
        self._log_watch.hear(report)
        if self._watch is not None:
            self._watch(report)
        self._coordinator_client.send(report)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside everything else; its failure is the node's."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, ForkServerEndedError):  # of that, its exit status tells
                self._break(str(error), code=type(error).__name__ if isinstance(error, HyperpodExtError) else _FAILED)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)

    def _why_broken(self) -> str:
        return self._broken.result() if self._broken.done() else ""

    def _lose(self, why: str) -> None:
        """A process that this node cannot be without is gone; a spare can take its place."""
        self._break(why, lost=True)

    def _break(self, why: str, *, code: str = _FAILED, lost: bool = False) -> None:
        """This node cannot go on."""
        self._say_last(c.NodeBroken(cause=why, code=code, lost=lost), why)

    def _say_last(self, report: c.NodeBroken | c.CancelJob, why: str) -> None:
        """Have the coordinator say what follows, and end anyway if it does not."""

        def give_up() -> None:
            if not self._broken.done():
                self._broken.set_result(why)

        if not self._coordinator_client.connected:
            give_up()
        else:
            self._tell(report)
            asyncio.get_running_loop().call_later(_LAST_WORD_S, give_up)

    def ask_to_end(self) -> None:
        """SIGTERM. Where others can do without this node, it alone may be meant: it leaves, if enough of them stay."""
        leaves = self._config.elastic is not None or self._config.restart.policy == "continue"
        if not leaves or self.asked_to_leave or not self._coordinator_client.connected:
            self._cancel()
            return
        self.asked_to_leave = True
        self._tell(c.Leave())

    def _take_notice(self, notice: notices.PreemptionNotice) -> bool:
        """This node will be taken away."""
        if not self._coordinator_client.connected:
            return False
        if not self.asked_to_leave:
            self._event("preemption_notice", cause=notice.cause, seconds_left=notice.seconds_left)
            self.ask_to_end()
        return True

    def _hears_nothing(self, why: str) -> None:
        self._event("no_notices", why=why)

    def _cancel(self) -> None:
        if self._coordinator is not None:
            self._coordinator.cancel()
        else:
            self._say_last(c.CancelJob(), "cancelled")
