"""A job with any number of ranks, to which anything may happen between two steps, next to the lists of the oracle."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sampler_oracle import Oracle

from hyperpod_ext.runtime.data import mixing, permutation
from hyperpod_ext.runtime.data.loader import ElasticDataLoader
from hyperpod_ext.runtime.data.mixing import Mixture
from hyperpod_ext.runtime.data.positions import GHOST, Slot
from hyperpod_ext.runtime.data.sampler import ElasticBatchSampler
from hyperpod_ext.runtime.data.shuffle import BlockShuffle

MIX_BLOCK = 16
"""Places of a mixture's block in these tests, so that runs see many."""
LENGTHS = st.one_of(
    st.integers(1, 90), st.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257])
)
WEIGHTS = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.5]), min_size=3, max_size=3).filter(any)
READERS = st.sampled_from(["sampler", "batches", "counted", "loader", "threads"])


class Numbers:
    """A source whose samples are their own ids, counted through all sources before it."""

    def __init__(self, length: int, first: int = 0) -> None:
        self._length, self._first = length, first

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._first + index


class Rank:
    """One process of the job. Reads by one of six ways, which must not matter."""

    def __init__(self, sampler: ElasticBatchSampler, reader: str, prefetch: int) -> None:
        self.sampler, self.reader, self.prefetch = sampler, reader, prefetch
        self._batches: Any = None
        self._ahead: list[list[int]] = []
        self._loader: ElasticDataLoader | None = None
        self._steps: Iterator[Any] | None = None
        self._state: dict[str, Any] | None = None

    def step(self) -> list[Slot]:
        """The next step's slots, as this reader gives them."""
        match self.reader:
            case "sampler":
                return self.sampler.step()
            case "batches" | "counted":
                return self._of_batches()
            case _:
                return self._of_loader()

    def ack(self) -> None:
        match self.reader:
            case "loader" | "threads" | "processes":
                assert self._loader is not None
                self._loader.ack(self._taken)
            case "counted":
                self._state = self._batches.state_dict()
            case _:
                self.sampler.ack()

    def state(self) -> dict[str, Any]:
        """State as it is saved, by way of JSON."""
        state = self._state if self.reader == "counted" and self._state else self.sampler.state_dict()
        return json.loads(json.dumps(state))  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()  # type: ignore[attr-defined]

    def read_by(self, reader: str, prefetch: int) -> None:
        """Go on with other workers; what the ones before have read ahead is lost."""
        self.close()
        self.reader, self.prefetch = reader, prefetch
        self._batches = self._loader = self._steps = None

    def read_part(self) -> None:
        """Read one micro-batch of the next step, and no more."""
        if self.reader in ("batches", "counted"):
            next(iter(self.sampler), None)

    def _of_batches(self) -> list[Slot]:
        """By iterating, as a DataLoader does: what is read ahead is kept for later, as by its workers."""
        if self.reader == "counted":  # the state moves with what was given
            wanted = self.sampler.step()
            if self._batches is None:
                self._batches = iter(self.sampler)
            got = self._next(len(wanted))
            if got is None:  # the epoch is over
                self._batches = iter(self.sampler)
                got = self._next(len(wanted))
        else:
            wanted = self.sampler.step()
            self._batches = iter(self.sampler)  # from the last acknowledged step, whatever was read ahead
            got = self._next(len(wanted))
            for _ in range(self.prefetch * 2):
                next(self._batches, None)
        assert got is not None, "the pass ended before its step"
        return [Slot(slot.index, ids, slot.weight) for slot, ids in zip(wanted, got, strict=True)]

    def _next(self, count: int) -> list[list[int]] | None:
        got = []
        for _ in range(count):
            ids = next(self._batches, None)
            if ids is None:
                assert not got, "an epoch ended within a step"
                return None
            got.append(ids)
        return got

    def _of_loader(self) -> list[Slot]:
        if self._loader is None:
            kind = {"threads": "thread", "processes": "process"}.get(self.reader)
            workers = {"workers": 1, "worker_kind": kind, "prefetch": self.prefetch + 1} if kind else {}
            self._loader = ElasticDataLoader(
                self.sampler.source,
                global_batch_size=1,
                micro_batch_size=1,
                shuffle=False,
                collate=list,
                **workers,  # type: ignore[arg-type]
            )
            self._loader.sampler = self.sampler
            self._steps = self._loader.steps()
        assert self._steps is not None
        self._taken = step = next(self._steps)
        return [Slot(slot.index, ids, weight) for slot, (ids, weight) in zip(step.slots, step, strict=True)]


class SamplerMachine(RuleBasedStateMachine):
    """Steps are slices of the oracle's lists, all ranks' states are equal, whatever happens in between."""

    steps_checked = 0
    """Over all examples: a run that checks nothing must not pass."""
    samples_checked = 0

    @initialize(
        lengths=st.one_of(st.lists(LENGTHS, min_size=1, max_size=1), st.lists(LENGTHS, min_size=3, max_size=3)),
        weights=WEIGHTS,
        seed=st.integers(0, 3),
        shuffle=st.sampled_from(["global", "global", (1, 1), (3, 2), (8, 4), None]),
        exact=st.sampled_from([1 << 16, 0, 20]),
        micro=st.integers(1, 4),
        slots=st.integers(1, 9),
        world=st.integers(1, 6),
        uneven=st.sampled_from(["ghost", "ragged"]),
        drop_last=st.booleans(),
        reader=READERS,
        prefetch=st.integers(0, 3),
    )
    def begin(
        self,
        lengths: list[int],
        weights: list[float],
        seed: int,
        shuffle: Any,
        exact: int,
        micro: int,
        slots: int,
        world: int,
        uneven: Any,
        drop_last: bool,
        reader: str,
        prefetch: int,
    ) -> None:
        permutation.EXACT_UP_TO, mixing.BLOCK = exact, MIX_BLOCK
        for cached in (mixing._block, mixing.quotas_of):
            cached.cache_clear()
        mixed = len(lengths) > 1
        sources = [Numbers(length, sum(lengths[:index])) for index, length in enumerate(lengths)]
        self.source: Any = Mixture(sources, weights) if mixed else sources[0]
        self.drop_last = drop_last and (mixed or lengths[0] >= micro * slots)
        self.batch, self.micro, self.seed, self.uneven = micro * slots, micro, seed, uneven
        self.asked = (self.batch, self.micro)
        self.shuffle = BlockShuffle(*shuffle) if isinstance(shuffle, tuple) else shuffle or False
        self.oracle = Oracle([*lengths], shuffle, seed, exact, MIX_BLOCK, weights if mixed else None)
        self.reader, self.prefetch = self.readable(reader), prefetch
        world = self.possible(world)
        self.ranks = [self.started(rank, world) for rank in range(world)]
        self.checkpoint()

    def teardown(self) -> None:
        for rank in getattr(self, "ranks", []):
            rank.close()
        permutation.EXACT_UP_TO, mixing.BLOCK = 1 << 16, 4096
        for cached in (mixing._block, mixing.quotas_of):
            cached.cache_clear()

    def started(self, rank: int, world: int, state: dict[str, Any] | None = None) -> Rank:
        """A process of the job as its script starts it."""
        batch, micro = self.asked
        sampler = ElasticBatchSampler(
            self.source,
            global_batch_size=batch,
            micro_batch_size=micro,
            rank=rank,
            world_size=world,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            uneven=self.uneven,
            acknowledge=self.reader != "counted",
        )
        if state is not None:
            sampler.load_state_dict(state)
        return Rank(sampler, self.reader, self.prefetch)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    @precondition(lambda self: self.oracle.weights is None)
    @rule()
    def to_the_end_of_the_epoch(self) -> None:
        epoch = self.oracle.epoch
        for _ in range(300):
            self.one_step()
            if self.oracle.epoch != epoch:
                break

    @rule(rank=st.integers(0, 5))
    def save(self, rank: int) -> None:
        self.checkpoint(rank)

    @rule(world=st.integers(1, 6), reader=READERS, prefetch=st.integers(0, 3), part=st.booleans())
    def crash(self, world: int, reader: str, prefetch: int, part: bool) -> None:
        """Every process is gone, in the middle of a step perhaps; the job begins again from what was saved."""
        if part:
            for rank in self.ranks:
                rank.read_part()
        self.close()
        state, self.oracle, (self.batch, self.micro) = self.saved[0], copy.deepcopy(self.saved[1]), self.saved[2]
        self.reader, self.prefetch = self.readable(reader), prefetch
        world = self.possible(world, self.asked)
        self.ranks = [self.started(rank, world, state) for rank in range(world)]

    @rule(world=st.integers(1, 6), giver=st.integers(0, 5))
    def resize(self, world: int, giver: int) -> None:
        """Survivors stay; who joins is told by any of them."""
        state = self.ranks[giver % len(self.ranks)].state()
        world = self.possible(world, self.asked)
        if self.reader == "counted":  # passes end at a resize
            self.close()
            self.ranks = [self.started(rank, world, state) for rank in range(world)]
            return
        for rank, survivor in enumerate(self.ranks[:world]):
            survivor.sampler.set_world(rank, world)
        for leaver in self.ranks[world:]:
            leaver.close()
        joiners = [self.started(rank, world, state) for rank in range(len(self.ranks), world)]
        self.ranks = self.ranks[:world] + joiners

    @precondition(lambda self: self.reader != "counted")
    @rule(reader=READERS.filter(lambda reader: reader != "counted"), prefetch=st.integers(0, 3))
    def change_workers(self, reader: str, prefetch: int) -> None:
        """Processes stay, and read by other workers."""
        self.reader, self.prefetch = self.readable(reader), prefetch
        for rank in self.ranks:
            rank.read_by(self.reader, prefetch)

    @precondition(lambda self: self.reader != "counted")
    @rule(micro=st.integers(1, 4), slots=st.integers(1, 9))
    def change_batch(self, micro: int, slots: int) -> None:
        if self.drop_last and self.oracle.weights is None and self.oracle.lengths[0] < micro * slots:
            return
        if self.possible(len(self.ranks), (micro * slots, micro)) < len(self.ranks):
            return
        self.batch, self.micro = micro * slots, micro
        for rank in self.ranks:
            rank.sampler.set_batch(self.batch, self.micro)

    @precondition(lambda self: self.oracle.weights is not None and self.reader != "counted")
    @rule(weights=WEIGHTS)
    def change_weights(self, weights: list[float]) -> None:
        self.oracle.reweigh(weights)
        for rank in self.ranks:
            rank.sampler.set_weights(weights)

    def possible(self, world: int, *also: tuple[int, int]) -> int:
        """The world size, or what ragged batches allow."""
        batches = [(self.batch, self.micro), *also]
        longest = self.oracle.lengths[0] if self.oracle.weights is None else None  # an epoch may be less than a batch
        slots = [-(-min(batch, longest or batch) // micro) for batch, micro in batches]
        return min(world, *slots) if self.uneven == "ragged" else world

    def readable(self, reader: str) -> str:
        """The way to read, or what ragged batches allow."""
        return "batches" if reader == "counted" and self.uneven == "ragged" else reader

    def one_step(self) -> None:
        """All ranks make a step."""
        slots = [rank.step() for rank in self.ranks]
        _, ids = self.oracle.take(self.batch, self.drop_last)
        type(self).steps_checked += 1
        type(self).samples_checked += len(ids)
        real = [slot for of_rank in slots for slot in of_rank if slot.index != GHOST]
        wanted = [ids[start : start + self.micro] for start in range(0, len(ids), self.micro)]
        assert [slot.ids for slot in real] == wanted, "not the samples of this step, slot by slot"
        assert [slot.index for slot in real] == [*range(len(wanted))], "slots are numbered otherwise"
        for slot in real:
            assert abs(slot.weight - len(slot.ids) / len(ids)) < 1e-12, "a weight is not the share of samples"
        counts = {len(of_rank) for of_rank in slots}
        assert max(counts) == -(-len(wanted) // len(slots)), "the busiest rank has more than its share"
        assert len(counts) == 1 or self.uneven == "ragged", "ranks differ in their number of micro-batches"
        for of_rank in slots:
            for slot in of_rank:
                is_idle = slot.weight == 0.0 and set(slot.ids) <= set(ids)
                assert slot.index != GHOST or is_idle, "a ghost counts, or has samples of another step"
        for rank in self.ranks:
            rank.ack()
        states = [rank.state() for rank in self.ranks]
        assert all(state == states[0] for state in states), "ranks differ in where they are"

    def checkpoint(self, rank: int = 0) -> None:
        state = self.ranks[rank % len(self.ranks)].state()
        self.saved = (state, copy.deepcopy(self.oracle), (self.batch, self.micro))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class WorkerMachine(SamplerMachine):
    """The same with real worker processes for most readers, and fewer ranks, as each start of one takes a fork."""

    def readable(self, reader: str) -> str:
        return "loader" if reader == "loader" else "processes"

    def possible(self, world: int, *also: tuple[int, int]) -> int:
        return min(super().possible(world, *also), 2)
