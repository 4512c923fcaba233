"""Checkpoint tiers for a script under plain torchrun. Each process makes one `Tiers` object, at the same time as all
other ranks."""

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
    """The checkpoint tiers of one job, used by its `TieredStorageWriter` and `TieredStorageReader` objects.

    Every rank must make this object, after `init_process_group`, and call its methods in the same order. The first rank
    of each node starts the node's memory server, unless one is already running. The memory server continues after this
    process has ended.

    Args:
        job: name of the job whose checkpoints are saved and loaded; only one training at a time may use the name.
        policy: a `CheckpointPolicy`, a dict with its fields, or the path of a job.yaml; None: only the memory tier.
        secret_file: file with at least 16 bytes, readable only by this user, which authenticates checkpoints and nodes;
            None: HPX_SECRET_FILE, or on a single machine a file that is made in the user's state directory.
        idle_exit_s: seconds without a connection after which the memory server makes all due copies to slower tiers,
            ends, and frees its memory.
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
        """On rank 0, the object that decides which step and sources all ranks load; None on other ranks."""
        self.local_plan: SavePlan | None = None
        """This rank's local plan of the last save, before DCP's planner removed state that other ranks save, too."""

    def _attach(self) -> Checkpointer:
        return Checkpointer(
            self._client,
            self.rank,
            world_size=self._ranks.world_size,
            job=self.job,
            secret=self.secret,
            # `skip` in the policy applies only to copies to slower tiers, because the script itself requests each save
            when_busy="supersede" if self.policy.when_busy == "supersede" else "wait",
        )

    # --- for the script ---------------------------------------------------------------------------

    @property
    def process_group(self) -> ProcessGroup | None:
        """A process group that training does not use, for `dcp.async_save(..., process_group=...)`."""
        return self._ranks.group

    def latest(self) -> int | None:
        """Return the newest step that all ranks can load; None if there is no checkpoint. Collective.

        The step's manifests are read and their MACs verified. The data is verified only when it is loaded.

        Raises:
            UnreachableError: a durable tier cannot be listed.
            NoCheckpointError: there are checkpoints, but none of them can be read.
        """
        choice = self._choose(None)
        return None if choice is None else choice.step

    def wait_durable(self, timeout_s: float, *, newest: bool = False) -> bool:
        """Wait until all due copies are in the slower tiers. Returns False after `timeout_s` seconds. Collective.

        Args:
            newest: whether to upload the newest checkpoint, too, even if the policy does not make its upload due.

        Raises:
            HyperpodExtError: a tier has refused a checkpoint. The error message contains the tier's reason.
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
        """Raise HyperpodExtError if a copy to a slower tier has failed since the last call."""
        for tier in self._client.ask(r.Status()).copying:
            before = self._failed.get(tier["tier"], 0)
            self._failed[tier["tier"]] = int(tier["failed"])
            if tier["failed"] > before:
                raise HyperpodExtError(f"{tier['tier']}: {tier['last_error']}")

    def close(self) -> None:
        """Disconnect from the memory server, which makes all due copies and ends after `idle_exit_s` seconds."""
        self._node.close()

    # --- saving, for the writer -------------------------------------------------------------------

    def begin_save(self, step: int) -> Save:
        """Return the step and the generation of the next save, and begin a new generation if needed. Collective.

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
        # rank 0's clock decides which tiers are due, so that all nodes copy the same step
        if kinds := answers[0][1]:
            self._timer.name(kinds, now)
            self._node.for_node("schedule copy", lambda: self._schedule(step, kinds))
        return Save(step, self._history.generation)

    def _schedule(self, step: int, kinds: Sequence[str]) -> None:
        for kind in kinds:
            self._client.ask(r.ScheduleCopy(step=step, kind=kind))

    def _enter(self, step: int) -> None:
        """Begin a generation whose number is higher than that of all snapshots in memory and in durable tiers."""
        generation = self._negotiate(None, saves=True)[1]
        self._run = self._run or self._ranks.broadcast("run", secrets.token_hex(8))
        self._entry = self._history.entry(step)
        self._node.for_node("enter", lambda: self._tell_generation(generation))
        self._client.forget_slot()  # request a slot again: the next save can then use a deleted snapshot's memory
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
            # again=False: a running upload of the loaded step continues, because this run does not save it again
            self._client.ask(r.Fence(generation=generation, step=entry.drop, run=self._run, again=False))

    def copy(self, save: Save, parts: Parts) -> None:
        """Copy this rank's state to shared memory, and add the snapshot's checksums. This call is not collective."""
        extras = {"sharing": "alike" if is_unsharded(parts) else "shard"}
        self._checkpointer.save(save.step, save.save_id, save.generation, parts, extras)
        self._checkpointer.flush()

    def end_save(self, save: Save, error: Exception | None) -> None:
        """End a save. The checkpoint is valid only if every rank has saved its state. Collective.

        Args:
            save: the save.
            error: this rank's error; None: it has saved its state.

        Raises:
            HyperpodExtError: a rank had an error, which is raised on every rank. The previous checkpoint stays
                unchanged.
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
        """Return a step whose snapshots all ranks have opened. Collective.

        Args:
            step: the step to load; None: the newest.
            failures: sources of the last choice that a rank could not read, which are not chosen again; the same on
                every rank.

        Raises:
            NoCheckpointError: there is no step that all ranks can load.
        """
        choice = self._choose(step, failures)
        if choice is None:
            hint = "tiers.latest() returns the newest step, or None if there is no checkpoint."
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
        """Return rank 0's decision on the sources that ranks load, and the next generation's number. Collective.

        Args:
            step: the step to load; None: the newest.
            saves: whether the caller is about to save; the loss of a saved step is then no error, because the script
                has its state.
        """
        offers = self._node.for_node("offers", lambda: self._offers(0 if saves else self._history.complete or 0))
        answers = self._ranks.all_gather("held", offers or {})
        ask = self._durable if self.policy.shared() else None
        if self.rank == 0:
            self._restoring = RestoreCoordinator(self.nodes.node_of, ask, self._run, script=True, step=step)
        return self._decide(lambda restoring: restoring.begin(answers))

    def _refuse(self, failures: Sequence[Refused]) -> Decision:
        """Return the next decision, which uses none of the failed sources. Collective."""
        refused, why = {one.place for one in failures}, "; ".join(one.why for one in failures)
        return self._decide(lambda restoring: restoring.refuse_offers(refused, why))[0]

    def _decide(self, act: Callable[[RestoreCoordinator], Decision]) -> tuple[Decision, int]:
        """Return rank 0's decision and the number of the next generation, the same on all ranks. Collective.

        Args:
            act: makes the decision, on rank 0 only.
        """
        restoring = self._restoring
        decision = self._node.together("decide", lambda: act(restoring).to_json() if restoring else None)
        answer = self._ranks.broadcast("decision", [decision, restoring.generation if restoring else 0])
        return Decision.from_json(answer[0]), int(answer[1])

    def _offers(self, committed: int) -> dict[str, Any]:
        offers = offers_of(self._node.held(), self._history.generation)
        return {**offers, "committed": committed}

    def _durable(self, exclude: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Return the checkpoints in durable tiers, except those in `exclude`. Only rank 0 calls this method."""
        answer = encode(self._client.ask(r.Durable(exclude=tuple(exclude))))
        return {**answer, "unreachable": ()} if self._history.generation else answer

    def gather_found(
        self, found: Mapping[int, Any], failures: Sequence[Refused]
    ) -> tuple[dict[int, Any], list[Refused]]:
        """Return the opened snapshots and the failures of all ranks. Collective."""
        mine = [[list(one) for one in found.items()], [[list(one.place), one.why] for one in failures]]
        everyones = self._ranks.all_gather("found", mine)
        refused = [Refused(tuple(place), why) for _, each in everyones for place, why in each]
        return {int(rank): one for each, _ in everyones for rank, one in each}, refused

    def open_source(self, source: Source) -> Snapshot:
        """Return the snapshot in `source`, whose manifest is verified, but whose data is not. This call is not
        collective."""
        match source.kind:
            case "memory":
                return self._checkpointer.load(source.rank, source.save_id)
            case "durable" if source.on_another_disk and source.node == self._node.node:
                return self._checkpointer.load(source.rank, source.save_id)
            case "durable" if not source.on_another_disk:
                return self._checkpointer.fetch(source.url, source.folder, source.rank)
            case _:
                if source.node not in self._node.addresses:
                    raise NotFoundError(
                        f"the snapshot is only in the memory of node {source.node}, and this job's nodes do not "
                        "exchange snapshots",
                        hint="Add a tier of kind peer or a durable tier to the checkpoint policy.",
                    )
                return self._checkpointer.read_peer(self._node.addresses[source.node], source.rank, source.save_id)

    def loaded(self, step: int) -> None:
        """Record that this rank's state was loaded from `step`. This call is not collective."""
        self._history.loaded(step)
