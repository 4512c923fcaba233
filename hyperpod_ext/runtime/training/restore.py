"""A `Run`'s link to the job: restores the state from memory, other ranks or durable tiers, and reports events.

`SoloLink` is for a script that is started with plain `python`. `JobLink` is for a script that a launcher starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.checkpoint.live_transfer import TransferOrder, receive_state, refuse_state, send_state
from hyperpod_ext.runtime.control_plane.agent import ControlPlane
from hyperpod_ext.runtime.control_plane.stop_at_step import StopAtStep
from hyperpod_ext.runtime.process_group.store import PartitionedStore
from hyperpod_ext.runtime.snapshot.select import Decision, Source
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot
from hyperpod_ext.runtime.state.same_data import FOR_EVER, check_same_data
from hyperpod_ext.runtime.state.training_state import TrainingState


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore on one rank."""

    step: int
    extras: dict[str, Any] = field(default_factory=dict)
    """Additional values of the snapshot, which the run restores itself."""
    bytes_moved: int = 0
    """Number of bytes of state received from other nodes."""
    bytes_local: int = 0
    """Number of bytes of state read from this node's memory."""
    bound: bool = True
    """Whether a MAC proves that this job wrote the restored snapshot (see `Snapshot.bound`)."""

    @property
    def from_memory(self) -> bool:
        """Whether the state comes from a node's memory, so that other processes have already trained in this run."""
        return bool(self.bytes_moved or self.bytes_local)


class Link(Protocol):
    """Restores state, and reports events."""

    stop_at_step: StopAtStep

    def restore(self, state: TrainingState, extras: Callable[[], dict[str, Any]]) -> Restored: ...

    def event(self, event: str, **fields: Any) -> None: ...

    def agree(self, topic: str, text: str, choose: Callable[[Sequence[str]], str]) -> str:
        """Return the text that rank 0's `choose` returns for the texts of all ranks, ordered by rank. Collective.

        Args:
            topic: name of this exchange, the same on every rank.
            text: this rank's text.
            choose: called on rank 0 only.
        """

    @property
    def over(self) -> bool:
        """Whether the generation has ended, even if the training function has not noticed its end yet."""

    @property
    def safe_to_commit(self) -> bool:
        """Whether the generation has ended, but the current step can still be committed."""


class SoloLink:
    """The link of a process without a launcher: restores nothing, and reports nothing."""

    def __init__(self) -> None:
        self.stop_at_step = StopAtStep()

    def restore(self, state: TrainingState, extras: Callable[[], dict[str, Any]]) -> Restored:
        return Restored(0)

    def event(self, event: str, **fields: Any) -> None:
        return

    def agree(self, topic: str, text: str, choose: Callable[[Sequence[str]], str]) -> str:
        return choose([text])

    @property
    def over(self) -> bool:
        return False

    @property
    def safe_to_commit(self) -> bool:
        return False


class JobLink:
    """The link of a job's rank: in each generation it restores the state as the coordinator has decided."""

    def __init__(self, session: ControlPlane, rank: int, checkpointer: Checkpointer) -> None:
        self._session, self.rank, self._checkpointer = session, rank, checkpointer
        self.stop_at_step = session.stop_at_step
        self._decision: Decision | None = None
        self._store: PartitionedStore | None = None
        self._peers: Mapping[int, tuple[str, int]] = {}

    def enter(
        self, decision: Decision, store: PartitionedStore, peers: Mapping[int, tuple[str, int]] | None = None
    ) -> None:
        """Begin a generation.

        Args:
            decision: the sources from which each rank restores.
            store: the key-value store of this generation.
            peers: host and port of memory servers by node, in a mapping to which the caller may add servers later.
        """
        self._decision, self._store, self._peers = decision, store, {} if peers is None else peers

    def event(self, event: str, **fields: Any) -> None:
        self._session.event(event, **fields)

    def agree(self, topic: str, text: str, choose: Callable[[Sequence[str]], str]) -> str:
        assert self._decision is not None, "agree() outside of a generation"
        assert self._store is not None
        store, chosen = self._store, f"hpx-{topic}/0"
        names = [f"hpx-{topic}-{other}/0" for other in range(1, _world_size(self._decision))]
        if self.rank:
            store.set(names[self.rank - 1], text)
            store.wait([chosen], FOR_EVER)
            return store.get(chosen).decode()
        store.wait(names, FOR_EVER)
        store.set(chosen, answer := choose([text, *(store.get(name).decode() for name in names)]))
        return answer

    @property
    def over(self) -> bool:
        return self._session.aborted

    @property
    def safe_to_commit(self) -> bool:
        return self._session.safe_to_commit

    def restore(self, state: TrainingState, extras: Callable[[], dict[str, Any]]) -> Restored:
        assert self._decision is not None, "restore() outside of a generation"
        decision, attempt = self._decision, 1
        if decision.source(self.rank).kind == "fresh":  # if one rank starts without a state, all ranks do
            assert self._store is not None
            check_same_data(self._store, self.rank, _world_size(decision), state.data_positions())
        while True:
            restored, error = self._try(state, extras, decision, attempt)
            step, following = self._session.restored(attempt, error)
            if step is not None:
                assert restored is not None
                self._checkpointer.close_peers()
                source = decision.source(self.rank)
                came: dict[str, Any] = {"bytes_moved": restored.bytes_moved, "bytes_local": restored.bytes_local}
                came |= {"tier": source.tier} if source.tier else {}
                came |= {} if restored.bound else {"unbound": True}
                kind = "script" if source.kind == "fresh" and step else source.kind
                self.event("restored", rank=self.rank, step=step, source=kind, **came)
                if self.rank == 0 and decision.checkpoint:
                    where = f"goes on after step {step}, from the checkpoint {decision.checkpoint}"
                    sys.stderr.write(f"hyperpod_ext: training {where}\n")
                return restored
            assert following is not None
            decision, attempt = following, attempt + 1

    def _try(
        self, state: TrainingState, extras: Callable[[], dict[str, Any]], decision: Decision, attempt: int
    ) -> tuple[Restored | None, str]:
        """Restore this rank's part of `decision`, and return the result or the text of the error.

        The caller reports the error to the coordinator, which then decides on another attempt.
        """
        try:
            return self._carry_out(state, extras, decision, attempt), ""
        except HyperpodExtError as error:
            if type(error) is JobFailedError and decision.source(self.rank).kind not in ("self", "fresh"):
                raise self._of_another_form(error, decision) from error
            return None, str(error)

    def _of_another_form(self, error: JobFailedError, decision: Decision) -> JobFailedError:
        """Return the error for a valid state that this script's objects cannot load, after which no older step is
        tried."""
        source = decision.source(self.rank)
        in_memory = f"rank {source.rank}" if source.kind == "live" else f"the memory of node {source.node}"
        place = f"{source.url}/{source.folder}" if source.url else in_memory
        return JobFailedError(
            f"step {decision.step}, from {place}, cannot be loaded: {error.message}",
            hint="Older steps are not tried. Restore with the objects that saved it, or give the job another name.",
        )

    def _carry_out(
        self, state: TrainingState, extras: Callable[[], dict[str, Any]], decision: Decision, attempt: int
    ) -> Restored:
        assert self._store is not None
        sources, key = decision.sources[self.rank], f"state-{attempt}"
        mine, orders = sources[0], orders_for(self.rank, decision)
        if mine.kind == "live":
            return self._load(
                state, [receive_state(self._store, key, [source.rank for source in sources])], sources[:1]
            )
        if mine.kind == "self":
            self._check_own(state, mine, key, orders)
        elif mine.kind != "fresh":
            return self._load(state, self._with_others(self._read(sources), mine), sources)
        if orders:
            send_state(self._store, key, orders, decision.step, state.take().parts, extras())
        return Restored(decision.step, extras() if mine.kind == "self" else {})

    def _read(self, sources: Sequence[Source]) -> list[Snapshot]:
        """Return the snapshots in `sources`. Manifests are verified now, the snapshots' data when it is read."""
        found = []
        if sources[0].kind == "parity":  # the XOR of all sources is one snapshot
            peers = {source.rank: self._peers[source.node] for source in sources}
            return [self._checkpointer.rebuild(peers, self.rank, sources[0].save_id)]
        for source in sources:
            match source.kind:
                case "memory":
                    snapshot = self._checkpointer.load(source.rank, source.save_id)
                case "durable" if not source.on_another_disk:
                    snapshot = self._checkpointer.fetch(source.url, source.folder, source.rank)
                case _:
                    snapshot = self._checkpointer.read_peer(self._peers[source.node], source.rank, source.save_id)
            found.append(snapshot)
        return found

    def _with_others(self, found: list[Snapshot], source: Source) -> list[Snapshot]:
        """Return `found`; if it has only this rank's snapshot, add a function that reads the other ranks' snapshots.

        If the state is sharded differently than the snapshot, it needs parts of the other ranks' snapshots.
        """
        (own, *rest), world_size = found, int((found[0].manifest or {}).get("world_size", 1))
        if rest or source.kind == "parity" or world_size == 1:
            return found

        def others() -> list[Snapshot]:
            ranks = [rank for rank in range(world_size) if rank != source.rank]
            if source.kind == "durable" and source.node < 0:
                return self._read([replace(source, rank=rank) for rank in ranks])
            return [self._checkpointer.find(rank, source.save_id, self._peers.values()) for rank in ranks]

        return [replace(own, others=others)]

    def _check_own(self, state: TrainingState, mine: Source, key: str, orders: Sequence[TransferOrder]) -> None:
        """Check that the objects hold the state that this rank offered when it joined, or load it into new objects."""
        why = ""
        if not _holds(state, mine):
            try:
                state.adopt()  # copy the state from the old objects in this process
            except JobFailedError as error:
                why = f" ({error})"
        if _holds(state, mine):
            return
        message = (
            f"the objects passed to restore() on rank {self.rank} do not have this rank's state, {mine.save_id}{why}"
        )
        if orders and self._store is not None:
            refuse_state(self._store, key, orders, message)
        raise JobFailedError(
            message,
            hint="Build the objects in run.keep, so that they are the same after a fault, and do not change them "
            "before the restore. DistributedDataParallel overwrites them with rank 0's values; run.data_parallel does "
            "not.",
        )

    @staticmethod
    def _load(state: TrainingState, snapshots: Sequence[Snapshot], sources: Sequence[Source]) -> Restored:
        state.load(snapshots, lean=True)
        if sources[0].kind == "parity":  # each source has sent as many bytes as the snapshot has
            (one,) = snapshots
            return Restored(one.step, dict(one.extras), one.plan.nbytes * len(sources))
        pairs = list(zip(snapshots, sources, strict=True))
        read = [(one.plan.nbytes if len(pairs) == 1 else one.nbytes_read, source.kind) for one, source in pairs]
        local = sum(nbytes for nbytes, kind in read if kind == "memory")
        moved = sum(nbytes for nbytes, kind in read if kind in ("peer", "live"))
        return Restored(snapshots[0].step, dict(snapshots[0].extras), moved, local, all(one.bound for one in snapshots))


def _world_size(decision: Decision) -> int:
    return decision.world_size or len(decision.sources)


def _holds(state: TrainingState, mine: Source) -> bool:
    consistent = state.consistent_step()
    return consistent is not None and consistent.save_id == mine.save_id


def orders_for(rank: int, decision: Decision) -> list[TransferOrder]:
    """Return the orders to send parts of the live state of `rank` to other ranks."""
    return [
        TransferOrder(receiver, part, len(sources))
        for receiver, sources in decision.sources.items()
        for part, source in enumerate(sources)
        if source.kind == "live" and source.rank == rank
    ]
