"""The tiers as a script under plain torchrun holds them: one object a process, made by all ranks together."""

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
    """Where checkpoints go, for the writers and readers of one job.

    Made after `init_process_group`, by every rank; so is every call of a method. The first rank of each node
    starts the node's memory server if there is none. It outlives this process, whatever ends that.

    Args:
        job: names the checkpoints; one training at a time uses a name.
        policy: a `CheckpointPolicy`, the same as a dict, or the path of a job.yaml. Default: memory alone.
        secret_file: authenticates checkpoints and nodes; at least 16 bytes, closed to other users. Default:
            HPX_SECRET_FILE, or, on one machine, one that is made in the user's state directory.
        idle_exit_s: the memory server ends when nobody has been connected for so long and all that was due
            is in the slower tiers. Until then it keeps its memory.
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
        """Of rank 0: decides what all load."""
        self.local_plan: SavePlan | None = None
        """This rank's part of the last save as it was planned, before what others hold alike was taken out of it."""

    def _attach(self) -> Checkpointer:
        return Checkpointer(
            self._client,
            self.rank,
            world_size=self._ranks.world_size,
            job=self.job,
            secret=self.secret,
            # a save that was asked for is made: `skip` is for the copies that follow it
            when_busy="supersede" if self.policy.when_busy == "supersede" else "wait",
        )

    # --- for the script ---------------------------------------------------------------------------

    @property
    def process_group(self) -> ProcessGroup | None:
        """For `dcp.async_save(..., process_group=...)`: a group that training does not use at the same time."""
        return self._ranks.group

    def latest(self) -> int | None:
        """The newest step that all ranks can load, as far as manifests and their MACs tell; None: there is none.

        Raises:
            UnreachableError: a durable tier does not say what it has.
            NoCheckpointError: there is something, and none of it can be read.
        """
        choice = self._choose(None)
        return None if choice is None else choice.step

    def wait_durable(self, timeout_s: float, *, newest: bool = False) -> bool:
        """Until all that is due has been copied to the slower tiers; False when that took too long.

        Args:
            newest: bring the newest checkpoint there too, whether it is due by the policy or not.

        Raises:
            HyperpodExtError: a tier refuses it, with the reason.
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
        """Raise for a copy that failed since this was last looked at."""
        for tier in self._client.ask(r.Status()).copying:
            before = self._failed.get(tier["tier"], 0)
            self._failed[tier["tier"]] = int(tier["failed"])
            if tier["failed"] > before:
                raise HyperpodExtError(f"{tier['tier']}: {tier['last_error']}")

    def close(self) -> None:
        """Let go of the memory server, which brings what is due to the slower tiers and ends some time later."""
        self._node.close()

    # --- saving, for the writer -------------------------------------------------------------------

    def begin_save(self, step: int) -> Save:
        """Agree on what the next save is called; a generation begins where one has to.

        Raises:
            JobFailedError: the ranks are about to save different steps.
        """
        now = time.monotonic()
        due = [kind for kind, every in self.policy.seconds().items() if self._timer.due(kind, every, now)]
        answers = self._ranks.all_gather("save", [step, due])
        if len(steps := {int(each[0]) for each in answers}) > 1:
            raise JobFailedError(f"the ranks save different steps at the same time: {sorted(steps)}")
        if self._history.needs_new(step):
            self._enter(step)
        # by the clock of rank 0; nobody seals before every node knows
        if kinds := answers[0][1]:
            self._timer.name(kinds, now)
            self._node.for_node("schedule copy", lambda: self._schedule(step, kinds))
        return Save(step, self._history.generation)

    def _schedule(self, step: int, kinds: Sequence[str]) -> None:
        for kind in kinds:
            self._client.ask(r.ScheduleCopy(step=step, kind=kind))

    def _enter(self, step: int) -> None:
        """Begin a generation: newer than any that is held, or that a durable tier knows of."""
        generation = self._negotiate(None, saves=True)[1]
        self._run = self._run or self._ranks.broadcast("run", secrets.token_hex(8))
        self._entry = self._history.entry(step)
        self._node.for_node("enter", lambda: self._tell_generation(generation))
        self._client.forget_slot()  # what was dropped may be written now
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
            # what was loaded is saved no more: its upload, if under way, is all that a durable tier gets of it
            self._client.ask(r.Fence(generation=generation, step=entry.drop, run=self._run, again=False))

    def copy(self, save: Save, parts: Parts) -> None:
        """Copy this rank's state to shared memory; it is sealed when this returns. By each rank for itself."""
        extras = {"sharing": "alike" if is_unsharded(parts) else "shard"}
        self._checkpointer.save(save.step, save.save_id, save.generation, parts, extras)
        self._checkpointer.flush()

    def end_save(self, save: Save, error: Exception | None) -> None:
        """All have saved, or none has.

        Raises:
            HyperpodExtError: what went wrong on some rank, on every rank; the checkpoint before is untouched.
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
        """Return a commit that every rank has opened: the newest, or that of `step`.

        Args:
            failures: what the last choice failed with, the same on every rank; it is not chosen again.

        Raises:
            NoCheckpointError: there is none.
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
            saves: ask before a save. The script has the state, so a saved step that no tier holds any more is no error.
        """
        offers = self._node.for_node("offers", lambda: self._offers(0 if saves else self._history.complete or 0))
        answers = self._ranks.all_gather("held", offers or {})
        ask = self._durable if self.policy.shared() else None
        if self.rank == 0:
            self._restoring = RestoreCoordinator(self.nodes.node_of, ask, self._run, script=True, step=step)
        return self._decide(lambda restoring: restoring.begin(answers))

    def _refuse(self, failures: Sequence[Refused]) -> Decision:
        """Return what all ranks load instead."""
        refused, why = {one.place for one in failures}, "; ".join(one.why for one in failures)
        return self._decide(lambda restoring: restoring.refuse_offers(refused, why))[0]

    def _decide(self, act: Callable[[RestoreCoordinator], Decision]) -> tuple[Decision, int]:
        """Have rank 0 decide for all."""
        restoring = self._restoring
        decision = self._node.together("decide", lambda: act(restoring).to_json() if restoring else None)
        answer = self._ranks.broadcast("decision", [decision, restoring.generation if restoring else 0])
        return Decision.from_json(answer[0]), int(answer[1])

    def _offers(self, committed: int) -> dict[str, Any]:
        offers = offers_of(self._node.held(), self._history.generation)
        return {**offers, "committed": committed}

    def _durable(self, exclude: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """What the durable tiers have, besides some. By rank 0."""
        answer = encode(self._client.ask(r.Durable(exclude=tuple(exclude))))
        return {**answer, "unreachable": ()} if self._history.generation else answer

    def gather_found(
        self, found: Mapping[int, Any], failures: Sequence[Refused]
    ) -> tuple[dict[int, Any], list[Refused]]:
        """What each rank has opened, and what failed, from all ranks."""
        mine = [[list(one) for one in found.items()], [[list(one.place), one.why] for one in failures]]
        everyones = self._ranks.all_gather("found", mine)
        refused = [Refused(tuple(place), why) for _, each in everyones for place, why in each]
        return {int(rank): one for each, _ in everyones for rank, one in each}, refused

    def open_source(self, source: Source) -> Snapshot:
        """One rank's snapshot; its manifest is verified, its bytes are not yet. By each rank for itself."""
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
        """The state is that of `step`: what is saved next follows it. By each rank for itself."""
        self._history.loaded(step)
