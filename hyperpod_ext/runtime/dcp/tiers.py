"""Checkpoint tiers for a script under plain torchrun: one object per process, made by all ranks together."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import SavePlan

from hyperpod_ext.config.checkpoint.by_time import DueByTime
from hyperpod_ext.errors import HyperpodExtError, JobFailedError, NoCheckpointError, NotFoundError
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.control_plane.decision import RestoreCoordinator, offers_of
from hyperpod_ext.runtime.dcp.choice import Choice, Refused
from hyperpod_ext.runtime.dcp.connection import MemoryConnection
from hyperpod_ext.runtime.dcp.policy import Policy, policy_of
from hyperpod_ext.runtime.dcp.state import is_unsharded
from hyperpod_ext.runtime.dcp.steps import Entry, Save, SaveHistory
from hyperpod_ext.runtime.ipc.declared import encode
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.snapshot.select import Decision, Source
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot
from hyperpod_ext.runtime.snapshot.tree import Parts


class Tiers:
    """The tiers of one job, used by its writers and readers.

    Every rank must make this object, after `init_process_group`, and call its methods in the same order. The first rank
    of each node starts the node's memory server if there is none. The server outlives this process.

    Args:
        job: name of the checkpoints; only one training at a time may use it.
        policy: a `CheckpointPolicy`, a dict with its fields, or the path of a job.yaml. Default: memory only.
        secret_file: file with at least 16 bytes, readable by this user only, which authenticates checkpoints and nodes.
            Default: HPX_SECRET_FILE; on a single machine, a file made in the user's state directory.
        idle_exit_s: seconds without a connection after which the memory server ends and frees its memory. All due
            copies to slower tiers are done first.
    """

    def __init__(
        self,
        job: str,
        policy: Policy | None = None,
        *,
        secret_file: str | os.PathLike[str] | None = None,
        idle_exit_s: float = 600.0,
    ) -> None:
        self.job, self.policy = job, policy_of(job, policy)
        self._node = MemoryConnection(job, self.policy, None if secret_file is None else Path(secret_file), idle_exit_s)
        self._ranks, self._client, self.secret = self._node.ranks, self._node.client, self._node.secret
        self.rank, self.nodes = self._ranks.rank, self._node.nodes
        self._checkpointer = self._node.together("attach", self._attach)
        self._history, self._entry, self._run = SaveHistory(), Entry(0, None), ""
        self._timer = DueByTime(time.monotonic())
        self._failed: dict[str, int] = {}
        self._restoring: RestoreCoordinator | None = None
        """Decides on rank 0 what all ranks load; None on other ranks."""
        self.local_plan: SavePlan | None = None
        """This rank's local plan of the last save, before the planner removed state that other ranks also have."""

    def _attach(self) -> Checkpointer:
        return Checkpointer(
            self._client,
            self.rank,
            world_size=self._ranks.world_size,
            job=self.job,
            secret=self.secret,
            # the script requested the save, so it is never skipped: `skip` only concerns the copies
            when_busy="supersede" if self.policy.when_busy == "supersede" else "wait",
        )

    # --- for the script ---------------------------------------------------------------------------

    @property
    def process_group(self) -> ProcessGroup | None:
        """A process group that training does not use, for `dcp.async_save(..., process_group=...)`."""
        return self._ranks.group

    def latest(self) -> int | None:
        """Return the newest step that all ranks can load, according to manifests and their MACs; None: there is none.

        Raises:
            UnreachableError: a durable tier cannot be listed.
            NoCheckpointError: there are checkpoints, but none can be read.
        """
        choice = self._choose(None)
        return None if choice is None else choice.step

    def wait_durable(self, timeout_s: float, *, newest: bool = False) -> bool:
        """Wait until all due copies are in the slower tiers; return False after `timeout_s`.

        Args:
            newest: also upload the newest checkpoint, even if the policy does not make it due.

        Raises:
            HyperpodExtError: a tier refuses a checkpoint; with the reason.
        """
        step = self._history.complete

        def wait() -> bool:
            if newest and step is not None:
                save_id = Save(step, self._history.generation).save_id
                idle = self._client.ask(r.UploadNow(save_id=save_id, timeout_s=timeout_s)).idle
            else:
                idle = self._client.ask(r.WaitIdle(timeout_s=timeout_s)).idle
            self._check_copies()
            return idle

        idle = self._node.for_node("durable", wait)
        return all(each is not False for each in self._ranks.all_gather("idle", idle))

    def _check_copies(self) -> None:
        """Raise HyperpodExtError if a copy has failed since the last call."""
        for tier in self._client.ask(r.Status()).copying:
            before = self._failed.get(tier["tier"], 0)
            self._failed[tier["tier"]] = int(tier["failed"])
            if tier["failed"] > before:
                raise HyperpodExtError(f"{tier['tier']}: {tier['last_error']}")

    def close(self) -> None:
        """Disconnect from the memory server. It finishes due copies, and ends after `idle_exit_s`."""
        self._node.close()

    # --- saving, for the writer -------------------------------------------------------------------

    def begin_save(self, step: int) -> Save:
        """Return the name of the next save, after all ranks have agreed on it. Begins a new generation if needed.

        Raises:
            JobFailedError: the ranks save different steps.
        """
        now = time.monotonic()
        due = [kind for kind, every in self.policy.seconds().items() if self._timer.due(kind, every, now)]
        answers = self._ranks.all_gather("save", [step, due])
        if len(steps := {int(each[0]) for each in answers}) > 1:
            raise JobFailedError(f"the ranks save different steps at the same time: {sorted(steps)}")
        if self._history.needs_new(step):
            self._enter(step)
        # by rank 0's clock; no rank seals this step before every node has the request
        if kinds := answers[0][1]:
            self._timer.name(kinds, now)
            self._node.for_node("schedule copy", lambda: self._schedule(step, kinds))
        return Save(step, self._history.generation)

    def _schedule(self, step: int, kinds: Sequence[str]) -> None:
        for kind in kinds:
            self._client.ask(r.ScheduleCopy(step=step, kind=kind))

    def _enter(self, step: int) -> None:
        """Begin a generation with a higher number than all snapshots in memory and in durable tiers."""
        generation = self._negotiate(None, saves=True)[1]
        self._run = self._run or self._ranks.broadcast("run", secrets.token_hex(8))
        self._entry = self._history.entry(step)
        self._node.for_node("enter", lambda: self._tell_generation(generation))
        self._client.forget_slot()  # slots of dropped snapshots are free now
        self._history.enter(generation)

    def _tell_generation(self, generation: int) -> None:
        entry, node = self._entry, self._node.node
        if self._node.ours:
            enter = r.Enter(
                generation=generation,
                base=entry.base,
                drop=entry.drop,
                run=self._run,
                node=node,
                nodes=self.nodes.count,
                owners=len(self.nodes.ranks(node)),
            )
            self._client.ask(enter)
        else:
            # the loaded step is not saved again, so a running upload of it must continue
            self._client.ask(r.Fence(generation=generation, step=entry.drop, run=self._run, again=False))

    def copy(self, save: Save, parts: Parts) -> None:
        """Copy this rank's state to shared memory, and seal it. Called by a single rank."""
        extras = {"sharing": "alike" if is_unsharded(parts) else "shard"}
        self._checkpointer.save(save.step, save.save_id, save.generation, parts, extras)
        self._checkpointer.flush()

    def end_save(self, save: Save, error: Exception | None) -> None:
        """End a save on all ranks: it counts only if every rank has saved.

        Raises:
            HyperpodExtError: a rank's error, on every rank. The checkpoint before is unchanged.
        """
        try:
            self._ranks.vote("saved", error)
        except HyperpodExtError:
            self._history.saved(save.step, False)
            raise
        saves = self._history.saved(save.step, True)
        if not self._node.leads:
            return
        if saves == 1:
            self._client.ask(r.Fence(generation=save.generation, step=self._entry.base, run=self._run, again=False))
        elif self._node.ours:
            self._client.ask(r.KeepOnly(ranks=tuple(self.nodes.ranks(self._node.node))))

    # --- loading, for the reader ------------------------------------------------------------------

    def choose(self, step: int | None, failures: Sequence[Refused] = ()) -> Choice:
        """Return a step that every rank has opened: the newest one, or `step`.

        Args:
            failures: failures of the last choice, the same on every rank; those sources are not chosen again.

        Raises:
            NoCheckpointError: there is no such step.
        """
        choice = self._choose(step, failures)
        if choice is None:
            hint = "tiers.latest() says which is the newest; None: there is nothing to load."
            raise NoCheckpointError(
                f"There is no checkpoint that all {self._ranks.world_size} ranks can load.", hint=hint
            )
        return choice

    def _choose(self, step: int | None, failures: Sequence[Refused] = ()) -> Choice | None:
        decision = self._refuse(failures) if failures else self._negotiate(step)[0]
        while decision.source(self.rank).kind != "fresh":
            choice = Choice(self, decision)
            if not (failures := choice.open()):
                return choice
            decision = self._refuse(failures)
        return None

    def _negotiate(self, step: int | None, *, saves: bool = False) -> tuple[Decision, int]:
        """Return the source that all ranks load, and the number of the next generation.

        Args:
            saves: whether a save follows. The script then has the state, so a lost saved step is no error.
        """
        offers = self._node.for_node("offers", lambda: self._offers(0 if saves else self._history.complete or 0))
        answers = self._ranks.all_gather("held", offers or {})
        ask = self._durable if self.policy.shared() else None
        if self.rank == 0:
            self._restoring = RestoreCoordinator(self.nodes.node_of, ask, self._run, script=True, step=step)
        return self._decide(lambda restoring: restoring.begin(answers))

    def _refuse(self, failures: Sequence[Refused]) -> Decision:
        """Return the next decision, without the failed sources."""
        refused, why = {one.place for one in failures}, "; ".join(one.why for one in failures)
        return self._decide(lambda restoring: restoring.refuse_offers(refused, why))[0]

    def _decide(self, act: Callable[[RestoreCoordinator], Decision]) -> tuple[Decision, int]:
        """Return rank 0's decision, and the number of the next generation, on all ranks."""
        restoring = self._restoring
        decision = self._node.together("decide", lambda: act(restoring).to_json() if restoring else None)
        answer = self._ranks.broadcast("decision", [decision, restoring.generation if restoring else 0])
        return Decision.from_json(answer[0]), int(answer[1])

    def _offers(self, committed: int) -> dict[str, Any]:
        offers = offers_of(self._node.held(), self._history.generation)
        return {**offers, "committed": committed}

    def _durable(self, exclude: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Return the checkpoints in durable tiers, except `exclude`. Called by rank 0."""
        answer = encode(self._client.ask(r.Durable(exclude=tuple(exclude))))
        return {**answer, "unreachable": ()} if self._history.generation else answer

    def gather_found(
        self, found: Mapping[int, Any], failures: Sequence[Refused]
    ) -> tuple[dict[int, Any], list[Refused]]:
        """Return the opened snapshots and the failures of all ranks."""
        mine = [[list(one) for one in found.items()], [[list(one.place), one.why] for one in failures]]
        everyones = self._ranks.all_gather("found", mine)
        refused = [Refused(tuple(place), why) for _, each in everyones for place, why in each]
        return {int(rank): one for each, _ in everyones for rank, one in each}, refused

    def open_source(self, source: Source) -> Snapshot:
        """Return one rank's snapshot with a verified manifest. Its bytes are not verified. Called by a single rank."""
        match source.kind:
            case "memory":
                return self._checkpointer.load(source.rank, source.save_id)
            case "durable" if source.on_another_disk and source.node == self._node.node:
                return self._checkpointer.load(source.rank, source.save_id)
            case "durable" if not source.on_another_disk:
                return self._checkpointer.fetch(source.url, source.folder, source.rank)
            case _:
                if source.node not in self._node.addresses:
                    raise NotFoundError(f"it is in the memory of node {source.node}, which serves no other nodes")
                return self._checkpointer.read_peer(self._node.addresses[source.node], source.rank, source.save_id)

    def loaded(self, step: int) -> None:
        """Record that the state was loaded from `step`; the next save follows that step. Called by a single rank."""
        self._history.loaded(step)
