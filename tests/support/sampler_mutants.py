"""Known bugs of other samplers, each as a change of ours. The state machine must find every one of them.

Those marked [M] were measured in the named project; the rest follow from reading it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from hyperpod_ext.runtime.data import mixing, permutation, sampler
from hyperpod_ext.runtime.data.mixing import Segment
from hyperpod_ext.runtime.data.positions import Cursor, Extent, Slot, StepPlan, extent_at
from hyperpod_ext.runtime.data.sampler import ElasticBatchSampler, MicroBatches


class LocalCounts(ElasticBatchSampler):
    """torchdata, HF skip_first_batches [M: 24,005 repeats, 6,000 missing]: each rank saves how many samples it read."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "place": state["place"] // self.world[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "place": min(state["place"] * self.world[1], self.length or 1 << 60)})


class OneResize(ElasticBatchSampler):
    """DLRover [M: 12,000 missing at the second resize]: what was read is counted since the last load alone."""

    _base = 0

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "place": max(0, state["place"] - self._base)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._base = self.cursor.place


class RoundedDown(ElasticBatchSampler):
    """LitData: at a resize the prefix is rounded down to whole batches of the new world."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        unit = self.micro_batch_size * self.world[1]
        super().load_state_dict({**state, "place": state["place"] // unit * unit})


class Padded(ElasticBatchSampler):
    """MosaicML, DistributedSampler [M: 29 repeats]: the tail is filled up with samples from the beginning."""

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        found = super().ids(epoch, start, stop)
        whole = -(-len(found) // self.micro_batch_size) * self.micro_batch_size
        return found + found[: whole - len(found)]


class TailDropped(ElasticBatchSampler):
    """Megatron [43 dropped], Grain: what does not fill a batch is never read."""

    def plan(self, cursor: Cursor, available: int | None = None) -> StepPlan:
        asked, self.drop_last = self.drop_last, self.drop_last or (self.length or 0) >= self.global_batch_size
        try:
            return super().plan(cursor, available)
        finally:
            self.drop_last = asked


class BatchOfWorld(ElasticBatchSampler):
    """torchft [M: 32,023 missing]: the global batch is whatever the ranks of now make together."""

    def plan(self, cursor: Cursor, available: int | None = None) -> StepPlan:
        asked = self._batch
        self._batch = (min(self.micro_batch_size * self.world[1], asked[0]), asked[1])
        try:
            return super().plan(cursor, available)
        finally:
            self._batch = asked


class ReadAhead(ElasticBatchSampler):
    """Loaders that save what was handed to workers: what they hold at a crash is never used."""

    _furthest: Cursor | None = None

    def plan(self, cursor: Cursor, available: int | None = None) -> StepPlan:
        plan = super().plan(cursor, available)
        self._furthest = max(self._furthest or plan.after, plan.after, key=lambda one: (one.epoch, one.place))
        return plan

    def state_dict(self) -> dict[str, Any]:
        return self.saved_at(self._furthest or self.cursor).to_dict()


class LateMicroBatches(MicroBatches):
    """Position moves when the next step is asked for."""

    _late = False

    def __next__(self) -> list[int]:
        if self._late:
            self._late = False
            super()._move()
        return super().__next__()

    def _move(self) -> None:
        self._late = True


class LateAdvance(ElasticBatchSampler):
    """StatefulDataLoader over a sampler that advances after its last yield [M: 60 repeats]."""

    def __iter__(self) -> MicroBatches:
        return LateMicroBatches(self)


class Strided(ElasticBatchSampler):
    """Grain after a resize, DistributedSampler: the right set of samples, dealt to ranks in turn."""

    def _slots(self, epoch: int, extent: Extent) -> list[Slot]:
        slots = super()._slots(epoch, extent)
        _, world_size = self.world
        every = self.ids(epoch, extent.start, extent.start + extent.count)
        dealt = [one for turn in range(world_size) for one in every[turn::world_size]]
        micro = self.micro_batch_size
        return [
            slot if slot.index < 0 else replace(slot, ids=dealt[slot.index * micro :][: len(slot.ids)])
            for slot in slots
        ]


class StepCounted(ElasticBatchSampler):
    """TrainerState.global_step x batch: the position follows from the number of steps and the batch of now."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        place = state["step"] * self.global_batch_size
        super().load_state_dict({**state, "place": min(place, self.length) if self.length else place})


class EpochForgotten(ElasticBatchSampler):
    """Saving after the last step of an epoch, and beginning it again."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        again = state["place"] == 0 and state["epoch"] > 0
        super().load_state_dict({**state, "epoch": state["epoch"] - 1} if again else state)


class UnevenOverlap(ElasticBatchSampler):
    """Shares of ceil(slots / world) for every rank: the last ranks read what others read."""

    def _slots(self, epoch: int, extent: Extent) -> list[Slot]:
        def overlapping(slots: int, rank: int, world_size: int) -> range:
            most = -(-slots // world_size)
            first = min(rank * most, max(0, slots - most))
            return range(first, min(slots, first + most))

        with mock.patch.object(sampler, "owned", overlapping):
            return super()._slots(epoch, extent)


class WeightedGhosts(ElasticBatchSampler):
    """Padding that counts: the loss of some samples is added twice."""

    def _slots(self, epoch: int, extent: Extent) -> list[Slot]:
        slots = super()._slots(epoch, extent)
        return [slot if slot.index >= 0 else replace(slot, weight=len(slot.ids) / extent.count) for slot in slots]


class RankZeroOnly(ElasticBatchSampler):
    """State that only one rank keeps up: who joins from another's begins again."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self.world[0] == 0 else {**state, "place": 0}


class WeightsForgetDraws(ElasticBatchSampler):
    """A change of weights begins every source anew."""

    def set_weights(self, weights: Any) -> None:
        super().set_weights(weights)
        if self._segment is not None:
            self._segment = replace(self._segment, drawn=(0,) * len(self._segment.drawn))


class WeightsOfAll(ElasticBatchSampler):
    """New weights are taken for the samples before, too: draws are counted as if they had always held."""

    def set_weights(self, weights: Any) -> None:
        super().set_weights(weights)
        if self._segment is not None:
            self._segment = Segment(0, self._segment.weights, (0,) * len(self._segment.drawn))


def _grain_order() -> Any:
    """Grain's index_shuffle [M]: no bijection at n = 4^k + 1, one sample is lost and another comes twice."""
    right = permutation.Permutation.at

    def at(self: permutation.Permutation, places: Any) -> Any:
        found = right(self, places)
        bits = (self.n - 1).bit_length() - 1
        wrong = self.n > 4 and self.n - 1 == 1 << bits and bits % 2 == 0
        return np.where(found == self.n - 1, 0, found) if wrong else found

    return mock.patch.object(permutation.Permutation, "at", at)


def _grain_epochs() -> Any:
    """Grain [M]: epoch 1 of seed s is epoch 0 of seed s + 1."""
    right = sampler.ids_at
    return mock.patch.object(
        sampler,
        "ids_at",
        lambda places, n, order, seed, source, epoch: right(places, n, order, seed + epoch, source, 0),
    )


def _chunked_draws() -> Any:
    """Mixtures that count a source's samples within what was asked for: another rank's part, other samples."""
    right = mixing._locate

    def locate(places: Any, segment: Segment, seed: int) -> Any:
        sources, draws = right(places, segment, seed)
        for one in np.unique(sources):
            mine = sources == one
            draws[mine] = draws[mine].min() // 2 + np.arange(np.count_nonzero(mine))
        return sources, draws

    return mock.patch.object(mixing, "_locate", locate)


def _no_epoch_in_key() -> Any:
    """DistributedSampler without set_epoch: every epoch in the same order."""
    right = sampler.ids_at
    return mock.patch.object(
        sampler, "ids_at", lambda places, n, order, seed, source, epoch: right(places, n, order, seed, source, 0)
    )


def _step_over_epochs() -> Any:
    """A step that takes the rest of its batch from the next epoch, and forgets that it did."""

    def extent(cursor: Cursor, length: int | None, batch: int, drop_last: bool) -> tuple[Cursor, Extent]:
        found, part = extent_at(cursor, length, batch, drop_last)
        return found, Extent(min(part.start, max(0, (length or 1 << 60) - batch)), part.count)

    return mock.patch.object(sampler, "extent_at", extent)


SUBCLASSES: list[type[ElasticBatchSampler]] = [
    LocalCounts,
    OneResize,
    RoundedDown,
    Padded,
    TailDropped,
    BatchOfWorld,
    ReadAhead,
    LateAdvance,
    Strided,
    StepCounted,
    EpochForgotten,
    UnevenOverlap,
    WeightedGhosts,
    RankZeroOnly,
    WeightsForgetDraws,
    WeightsOfAll,
]
PATCHES: list[Callable[[], Any]] = [_grain_order, _grain_epochs, _chunked_draws, _no_epoch_in_key, _step_over_epochs]
MUTANTS: dict[str, tuple[type[ElasticBatchSampler], Callable[[], Any] | None]] = {
    **{one.__name__: (one, None) for one in SUBCLASSES},
    **{one.__name__.strip("_"): (ElasticBatchSampler, one) for one in PATCHES},
}

SOURCES = {"WeightsForgetDraws": 3, "WeightsOfAll": 3, "chunked_draws": 3, "TailDropped": 1}
"""Of bugs that only mixtures, or only single sources show."""


@contextmanager
def mutant(name: str) -> Iterator[type[ElasticBatchSampler]]:
    """The sampler's class with this bug in it."""
    sampler_class, patch = MUTANTS[name]
    with ExitStack() as stack:
        if patch is not None:
            stack.enter_context(patch())
        yield sampler_class
