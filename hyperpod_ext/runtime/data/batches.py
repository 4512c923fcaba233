"""The sampler as torch's DataLoader goes through it: micro-batch after micro-batch, up to the end of the epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hyperpod_ext.errors import JobFailedError

if TYPE_CHECKING:
    from hyperpod_ext.runtime.data.sampler import ElasticBatchSampler, Slot


class MicroBatches(Iterator[list[int]]):
    """One pass over the rest of an epoch. Its own state is what it has given, as StatefulDataLoader wants it."""

    def __init__(self, sampler: ElasticBatchSampler) -> None:
        self._sampler = sampler
        self._begin()

    def _begin(self) -> None:
        self._cursor = self._sampler.cursor
        self._planned_for = (self._sampler.version, self._sampler.world)
        self._epoch = self._sampler.plan(self._cursor).cursor.epoch
        self._slots: deque[Slot] = deque()

    def __next__(self) -> list[int]:
        if self._planned_for != (self._sampler.version, self._sampler.world):
            raise JobFailedError(
                "the sampler was changed while a loader went through it", hint="Begin a new pass over the loader."
            )
        while not self._slots:
            plan = self._sampler.plan(self._cursor)
            if plan.cursor.epoch != self._epoch:
                self._sampler.unacknowledged += self._sampler.acknowledge
                raise StopIteration
            self._slots, self._after = deque(plan.slots), plan.after
            if not self._slots:
                self._move()
        slot = self._slots.popleft()
        if not self._slots:
            self._move()  # before the last is given: who counts by what was given would count one step less
        return slot.ids

    def _move(self) -> None:
        self._cursor = self._after
        if not self._sampler.acknowledge:
            self._sampler.cursor = self._cursor

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.saved_at(self._cursor).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._begin()
