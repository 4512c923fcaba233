"""Control plane of a worker without our agent: the ranks exchange their state, and rank 0 decides.

Launchers differ in how a generation begins and how a fault is reported: see `hyperpodrun.py` and `torchrun.py`. This
module has the parts that all launchers share: the map of ranks to nodes, the snapshots of each node, the restore
decision, and the exchange of reports between ranks.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.files import make_private_folder
from hyperpod_ext.runtime.control_plane.agent import AbortedError, Generation
from hyperpod_ext.runtime.control_plane.decision import RestoreCoordinator, offers_of
from hyperpod_ext.runtime.control_plane.exchange import Exchange, parent_of
from hyperpod_ext.runtime.control_plane.node_memory_client import NodeMemoryClient
from hyperpod_ext.runtime.control_plane.own_store import OwnStore, wait_listening
from hyperpod_ext.runtime.control_plane.save_at_time import TimedTiers
from hyperpod_ext.runtime.control_plane.settings import Settings, sized
from hyperpod_ext.runtime.control_plane.stop_at_step import StopAtStep
from hyperpod_ext.runtime.events.durable_steps import left_out
from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.log import append, checked
from hyperpod_ext.runtime.events.spool import SpoolWriter
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.environment import ENV_RUN_DIR, WorkerEnvironment
from hyperpod_ext.runtime.ipc.messages import RefusedError, WireError
from hyperpod_ext.runtime.membership.node_map import Nodes
from hyperpod_ext.runtime.memory_server.client.start import ServerFiles, place_of, runtime_dir
from hyperpod_ext.runtime.memory_server.protocol.request import error_of
from hyperpod_ext.runtime.process_group.groups import ProcessGroups
from hyperpod_ext.runtime.process_group.store import Address, GenerationOverError, PartitionedStore
from hyperpod_ext.runtime.snapshot.manifest import save_id_of
from hyperpod_ext.runtime.snapshot.select import Decision
from hyperpod_ext.runtime.state.training_state import ConsistentStep

_ANSWER_S = 60.0
"""Maximum time in seconds that a rank waits for the launcher's reaction after it lost its connections."""
_LONG_S = 7 * 24 * 3600.0
"""Maximum time in seconds to wait until training has ended on all ranks, which may end at very different times."""


@dataclass(frozen=True, slots=True)
class RendezvousRound:
    """One attempt of all ranks to train together, with the ranks and addresses that the launcher assigned."""

    number: int
    """Number of the attempt within one start of the processes. The number is part of the store's keys."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    addresses: tuple[Address, ...]
    """Addresses of the ranks' key-value servers, in the order of ranks."""

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size


class Members(ABC):
    """Control plane of one process in a job without our agent, with a subclass for each launcher."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        if (folder := os.environ.get(ENV_RUN_DIR)) is not None:  # make the run folder, because no agent has made it
            make_private_folder(Path(folder))
        self.stop_at_step = StopAtStep()  # hyperpodrun and torchrun never request a stop
        self.environment: WorkerEnvironment | None = None
        self._settings: Settings | None = None
        self._keys: OwnStore | None = None
        self._node: NodeMemoryClient | None = None
        self._nodes = Nodes({}, ())
        self._round: RendezvousRound | None = None
        self._store: PartitionedStore | None = None
        self._exchange: Exchange | None = None
        self._restoring: RestoreCoordinator | None = None
        self._over = 0
        self._finishing = False
        self._changed = threading.Condition()
        self._generation, self._committed, self._began = 0, 0, dict[int, int]()
        self._timed: TimedTiers | None = None
        self._decision: Decision | None = None
        self._spool: SpoolWriter | None = None
        self._run = secrets.token_hex(8)

    # --- differences between launchers ------------------------------------------------------------

    @abstractmethod
    def _next_round(self) -> RendezvousRound:
        """Wait until the launcher starts a new attempt, and return it. The first call must set `_settings` and
        `_keys`."""

    @abstractmethod
    def failed(self, failure: c.Failed) -> bool:
        """Report an exception of the training function. Returns False if this process must end."""

    def _met(self, rendezvous: RendezvousRound, store: PartitionedStore) -> None:  # noqa: B027  (most launchers need nothing here)
        """Called when all ranks of `rendezvous` have connected."""

    def _going(self, step: int) -> None:  # noqa: B027  (most launchers need nothing here)
        """Called when all ranks continue after `step`."""

    def _uploads_done(self) -> None:  # noqa: B027  (most launchers need nothing here)
        """Called at the end of training, when this node's due checkpoints are in the durable tiers."""

    def _comes_again(self) -> bool:
        """Return whether the launcher will start the job again, although its training is complete."""
        return False

    # --- joining ----------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        assert self._settings is not None, "known since the first generation"
        return self._settings

    @property
    def rank(self) -> int:
        return self._round.rank if self._round is not None else -1

    def join(self, live: ConsistentStep | None) -> Generation:
        while True:
            rendezvous = self._next_round()
            try:
                return self._form(rendezvous, live)
            except ConnectionError as error:
                if self._store is not None:
                    self._store.cancel()
                if isinstance(error, RefusedError) or not self.wait_aborted(_ANSWER_S):
                    raise self._apart(error) from error

    def _apart(self, error: ConnectionError) -> JobFailedError:
        if isinstance(error, WireError):
            return JobFailedError(
                f"rank {self.rank} does not belong to the job of the other ranks: {error}",
                hint="All ranks need the same secret: put it into a file of mode 600 and name that in HPX_SECRET_FILE.",
            )
        return JobFailedError(
            f"rank {self.rank} lost its connections to other ranks: {error}",
            hint="The logs of the other ranks may show the first error.",
        )

    def _form(self, rendezvous: RendezvousRound, live: ConsistentStep | None) -> Generation:
        assert self._keys is not None
        store = self._keys.store(rendezvous.addresses, rendezvous.number, rendezvous.rank)
        with self._changed:
            self._round, self._store, self._finishing = rendezvous, store, False
            if self.aborted:
                raise GenerationOverError("the generation was over before it began")
        limit_s = self.settings.config.restart.form_timeout_s
        above = parent_of(rendezvous.rank)
        wait_listening(above, rendezvous.addresses[above], lambda: self.aborted, limit_s)
        self._exchange = exchange = Exchange(store, rendezvous.rank, rendezvous.world_size, limit_s)
        me = {"place": place_of(runtime_dir()), "node": str(rendezvous.node), "pid": os.getpid()}
        ranks = exchange.ask("who", me, list)
        self._met(rendezvous, store)
        self._nodes = nodes = Nodes.of(ranks)
        environment = self._environment(rendezvous, nodes)
        self.event("joined", rank=rendezvous.rank, pid=os.getpid(), live_step=live and live.step)
        answer = exchange.ask(
            "join", self._offer(live if environment == self.environment else None, ranks), self._begin
        )
        self.environment = environment
        self._generation, self._run = int(answer["generation"]), str(answer["run"])
        decision = self._decision = Decision.from_json(answer["decision"])
        peers = {int(node): address for node, address in answer["peers"].items()}
        if self._node is not None:
            self._node.begin(self._generation, peers)
        if rendezvous.rank == 0:
            if self._generation == 1:
                world_size, count = rendezvous.world_size, nodes.count
                self.event("job_started", world_size=world_size, nodes=count, spares=self.settings.config.spares)
            self.event("generation", step=decision.step, world_size=rendezvous.world_size)
        servers = {node: (str(host), int(port)) for node, (host, port, _) in peers.items() if port}
        return Generation(self._generation, decision, rendezvous.addresses, servers)

    def _environment(self, rendezvous: RendezvousRound, nodes: Nodes) -> WorkerEnvironment:
        node = nodes.node_of[rendezvous.rank]
        settings, leads = self.settings, nodes.leader(node) == rendezvous.rank
        self._node = (self._node or NodeMemoryClient(settings.config, settings.secret_file)) if leads else None
        place = self._place(node)
        if self._spool is None and (settings.config.checkpoint.durable() or settings.config.metrics is not None):
            self._spool = SpoolWriter(place.events)
        return WorkerEnvironment(
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            local_rank=rendezvous.local_rank,
            node=node,
            agent_socket="",
            memory_socket=str(place.socket),
            secret=settings.secret,
            config=sized(settings.config, nodes.count, rendezvous.local_world_size),
        )

    def _place(self, node: int) -> ServerFiles:
        return ServerFiles(runtime_dir(), self.settings.config.name, self._nodes.index(node))

    def _offer(self, live: ConsistentStep | None, ranks: Sequence[Any]) -> dict[str, Any]:
        """Return this rank's report for a join. The report of a node's first rank includes the state of the node's
        memory server."""
        mine: dict[str, Any] = {
            "live": None if live is None else asdict(live),
            "committed": self._committed,
            "began": self._began,
            "generation": self._generation,
        }
        assert self._round is not None
        if self._node is not None:
            number = self._nodes.node_of[self._round.rank]
            pids = [int(ranks[rank]["pid"]) for rank in self._nodes.ranks(number)]
            try:
                self._node.connect(self._place(number), number)
                host = self._round.addresses[self._round.rank][0]
                held = self._node.held(pids)
                mine |= {**offers_of(held, self._generation), "peer": [number, *self._node.listen(host)]}
                for problem in held.disk.get("problems", ()):
                    self._log(f"warning: node {number}: {problem}")
            except HyperpodExtError as error:  # report the error, because the other ranks wait for this rank's report
                mine["error"] = error.to_json()
        return mine

    def _begin(self, ranks: Sequence[Any]) -> dict[str, Any]:
        """Return rank 0's decision for all ranks: step to restore, generation, the run's name, and memory servers."""
        durable = bool(self.settings.config.checkpoint.shared()) and self._node is not None
        self._restoring = RestoreCoordinator(
            self._nodes.node_of, self._node.durable if durable and self._node else None, self._run
        )
        decision = self._restoring.begin(ranks)
        peers = {one["peer"][0]: one["peer"][1:] for one in ranks if "peer" in one}
        return {
            "decision": decision.to_json(),
            "generation": self._restoring.generation,
            "run": self._run,
            "peers": peers,
        }

    def open_store(self, generation: Generation) -> PartitionedStore:
        assert self._store is not None, "it has joined"
        return self._store

    # --- restoring, and the end -------------------------------------------------------------------

    def restored(self, attempt: int, error: str) -> tuple[int | None, Decision | None]:
        answer = self._ask(f"restored-{attempt}", error, self._count)
        if answer is not None:
            self._decision = Decision.from_json(answer)
            return None, self._decision
        assert self._decision is not None
        self._ask(f"ready-{attempt}", self._go(self._decision), _all_ready)
        step = self._decision.step
        self._began[self._generation] = self._committed = step
        self._timed = self._timed or TimedTiers(self.settings.config.checkpoint, time.monotonic())
        self._timed.enter()
        if self.rank == 0:
            checkpoint = self._decision.checkpoint
            self.event("go", step=step, checkpoint=checkpoint)
            source = f", from the checkpoint {checkpoint}" if checkpoint else ""
            self._log(f"all ranks continue after step {step}{source} (generation {self._generation})")
        self._going(step)
        return step, None

    def _count(self, errors: Sequence[str]) -> dict[str, Any] | None:
        """Return rank 0's answer to the reports of restores: None if all ranks have restored, otherwise the next
        decision."""
        failed = {rank: error for rank, error in enumerate(errors) if error}
        for rank, error in failed.items():
            self.event("restore_failed", rank=rank, error=error)
        assert self._restoring is not None
        return self._restoring.refuse(failed).to_json() if failed else None

    def _go(self, decision: Decision) -> dict[str, Any] | None:
        """Report the start of training to this node's memory server, before any rank of the node can save.

        Returns the error as JSON; None if there was no error, or if this rank is not the first of its node.
        """
        if self._node is None or self._round is None:
            return None
        number = self._nodes.node_of[self._round.rank]
        try:
            owners = len(self._nodes.ranks(number))
            self._node.go(self._generation, decision, self._run, number, self._nodes.count, owners)
        except HyperpodExtError as error:
            return error.to_json()
        return None

    def finished(self, digest: str) -> None:
        self._finishing = True
        self.event("done", rank=self.rank, digest=digest)
        again = self._ask("finished", self._comes_again(), any, _LONG_S)
        if self._node is None:
            return
        if self.settings.config.checkpoint.durable():
            self._upload_last(self._node)
        if self.rank == 0 and not (again or self._comes_again()):
            self.event("job_ended", state="succeeded")
        if again or self._comes_again():  # the restarted job will find that its training is complete
            self._node.hand_over()
            return
        self._node.wait_uploaded()
        self._uploads_done()
        self._node.end()

    def _upload_last(self, memory: NodeMemoryClient) -> None:
        """Upload the last step to the durable tiers before this process ends; log parts that could not be uploaded."""
        step, node = self._committed, self._nodes.node_of[self.rank]
        limit_s = self.settings.config.checkpoint.finish_s
        self._log(f"step {step} goes to the durable tiers")
        for progress in memory.upload(save_id_of(self._generation, step)):
            tiers = progress.tiers
            if not progress.idle:
                left = sum(int(tier["left_bytes"]) for tier in tiers)
                self._log(f"node {node} uploads its part of step {step}: {left / (1 << 20):.1f} MiB left")
        final_save = {"step": step if tiers else None, "made": step, "nodes": [node]}
        uploaded = {"node": node, "in_time": progress.idle, "limit_s": limit_s, "tiers": tiers}
        self.event("final_save", **final_save)
        self.event("uploaded", **uploaded)
        for line in left_out(Events([checked("final_save", final_save)[0], checked("uploaded", uploaded)[0]])):
            self._log(f"warning: {line}")

    def _ask(self, what: str, value: Any, decide: Any, timeout_s: float | None = None) -> Any:
        assert self._exchange is not None, "outside of a generation"
        try:
            return self._exchange.ask(what, value, decide, timeout_s)
        except ConnectionError as error:
            if self.aborted:
                raise AbortedError(f"generation {self._generation} is over") from error
            raise

    # --- the end of a generation ------------------------------------------------------------------

    @property
    def aborted(self) -> bool:
        return self._round is not None and self._over >= self._round.number

    @property
    def safe_to_commit(self) -> bool:
        return False  # never commit: jobs without our agent do not record the state of the collectives

    def _abort(self, number: int) -> None:
        """End the attempt `number` of all ranks to train, and wake all threads that wait in it. Any thread may call
        this method."""
        with self._changed:
            self._over = max(self._over, number)
            if self._store is not None and self.aborted:
                self._store.cancel()
            self._changed.notify_all()
        self._groups.abort()

    def wait_aborted(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.aborted, timeout_s)

    # --- events and logs --------------------------------------------------------------------------

    def event(self, event: str, **fields: Any) -> None:
        """Write an event to the job's log in the durable tier, and to events-rankN.jsonl in the run directory.

        Without a durable tier, or without a run directory, the respective log does not exist.
        """
        if event == "step":
            self._committed = int(fields["step"])
            self._keep_time(self._committed)
        if self.rank < 0:
            return
        fields = {"generation": self._generation, **fields}
        _, line = checked(event, fields)
        if self._spool is not None:
            self._spool.write(line)
        if (directory := os.environ.get(ENV_RUN_DIR)) is not None:
            append(Path(directory) / f"events-rank{self.rank}.jsonl", line)

    def _keep_time(self, step: int) -> None:
        if self._timed is None or self._store is None:
            return
        names, hears = self.rank == 0, self._node is not None
        try:
            due = self._timed.made(step, time.monotonic(), self._store, names=names, hears=hears)
        except ConnectionError:
            return  # the generation has ended, which the training loop will notice
        for kind, at in due.items():
            assert self._node is not None
            self._node.schedule_copy(kind, at)

    def _report_fault(self, step: int, cause: str) -> None:
        node = self._nodes.node_of.get(self.rank, 0)
        self.event("fault", rank=self.rank, node=node, step=step, cause=cause, died=False)

    def _log(self, what: str) -> None:
        sys.stderr.write(f"hyperpod_ext: {what}\n")


def _all_ready(errors: Sequence[Any]) -> None:
    for error in errors:
        if error is not None:
            raise error_of(error)
