"""ElasticBatchSampler: chooses the samples of each step, and this rank's part of the samples.

Sample numbers depend only on seed, order and position. The world size only decides which rank has which slot
(micro-batch). The saved state is small and equal on every rank. The saved state is the position up to which steps have
*used* samples; samples that were only read ahead are read again after a fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.mixing import Mixture, Segment, drawn_before, ids_of_mixture, quotas_of
from hyperpod_ext.runtime.data.permutation import MOST
from hyperpod_ext.runtime.data.positions import (
    GHOST,
    Cursor,
    Extent,
    Slot,
    StepPlan,
    after,
    extent_at,
    most_owned,
    owned,
    slots_of,
    steps_per_epoch,
)
from hyperpod_ext.runtime.data.saved import Saved, read_state
from hyperpod_ext.runtime.data.shuffle import Shuffle, ids_at, name_of, order_of
from hyperpod_ext.runtime.data.sources import fingerprint_of, length_of
from hyperpod_ext.runtime.data.world import part_of, world_of_this_process

Uneven = Literal["ghost", "ragged", "error"]


class ElasticBatchSampler:
    """Global batches of `global_batch_size` samples, divided into slots of `micro_batch_size`, for any number of ranks.

    Every sample is used once per epoch, for any history of world sizes, crashes and batch sizes. `uneven` decides
    what happens if the slots cannot be divided equally among the ranks. With `ghost`, additional slots of weight 0 give
    every rank equally many slots, as FSDP requires. With `ragged`, some ranks have one slot less than others, and
    perhaps no slot in the last step of an epoch. With `error`, the sampler raises JobFailedError.

    An instance can be used as `batch_sampler` of `torch.utils.data.DataLoader`. Call `ack()` after each optimizer step,
    so that the saved state follows the used samples. With torchdata's StatefulDataLoader, which counts the batches
    itself, use acknowledge=False.

    Args:
        rank, world_size: default to torch.distributed's values or, without a process group, to RANK and WORLD_SIZE.
            Defaults are read at each iteration.
        fingerprint: replaces the source's fingerprint. The argument is needed if the source has no fingerprint, or if
            its fingerprint changes between runs.

    Raises:
        JobFailedError: the micro-batch size does not divide the batch size, a source has no length, or there are too
            few samples for one step.
    """

    def __init__(
        self,
        source: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: Shuffle = "global",
        drop_last: bool = False,
        uneven: Uneven = "ghost",
        fingerprint: str | None = None,
        acknowledge: bool = True,
    ) -> None:
        if uneven not in ("ghost", "ragged", "error"):
            raise JobFailedError(f"uneven={uneven!r} is not a valid value", hint='Give "ghost", "ragged" or "error".')
        if uneven == "ragged" and not acknowledge:
            raise JobFailedError(
                'uneven="ragged" with acknowledge=False: a rank without a micro-batch would count one step less',
                hint='Give uneven="ghost", or acknowledge steps.',
            )
        self.source = source
        self.length = length_of(source)
        """Number of samples in an epoch; None if the source is a stream."""
        self.seed, self.drop_last, self.uneven, self.acknowledge = int(seed), drop_last, uneven, acknowledge
        self._order = order_of(shuffle)
        self._fingerprint = fingerprint or fingerprint_of(source)
        self.endless = isinstance(source, Mixture)
        """Whether the data has no epochs. A mixture has no epochs, but each of its sources has epochs."""
        self._check_length()
        self._asked = self._batch = self._checked_batch(global_batch_size, micro_batch_size)
        self._segment: Segment | None = None
        if isinstance(source, Mixture):
            self._segment = Segment(0, source.weights, (0,) * len(source.sources))
        self.cursor = Cursor()
        """Position of the first step that is not acknowledged yet."""
        self.version = 0
        """Counter of changes to the settings. Plans that were made with a smaller version are no longer valid."""
        self._given: tuple[int, int] | None = None
        self.unacknowledged = 0
        """Number of passes over the data that ended since the last acknowledged step."""
        if rank is not None or world_size is not None:
            self.set_world(rank, world_size)

    @property
    def global_batch_size(self) -> int:
        """Number of samples in one step, over all ranks."""
        return self._batch[0]

    @property
    def step_size(self) -> int:
        """Number of samples in the next step, over all ranks. This number is smaller than usual while ranks are
        missing, if the job's spec has `samples: fewer`."""
        batch, micro = self._batch
        return batch if self._given is not None else micro * part_of(batch // micro)

    @property
    def micro_batch_size(self) -> int:
        """Number of samples in one slot."""
        return self._batch[1]

    @property
    def world(self) -> tuple[int, int]:
        """Present rank and world size."""
        return self._given if self._given is not None else world_of_this_process()

    # --- steps ----------------------------------------------------------------------------------

    def step(self) -> list[Slot]:
        """Return this rank's slots in the next step. The slots do not change until the step is acknowledged."""
        return self.plan(self.cursor).slots

    def plan(self, cursor: Cursor, available: int | None = None) -> StepPlan:
        """Return the plan of the step at `cursor`. If the cursor's epoch is over, return the plan of the next epoch's
        first step.

        available: number of samples left in a stream, if fewer than a global batch; None in all other cases.
        """
        batch = self.step_size
        length = None if self.endless else self.length
        if available is not None and available < batch:
            length = cursor.place + available
        cursor, extent = extent_at(cursor, length, batch, self.drop_last)
        then = after(cursor, extent, length, batch, self.drop_last)
        return StepPlan(cursor, then, extent, self._slots(cursor.epoch, extent), self.version)

    def _slots(self, epoch: int, extent: Extent) -> list[Slot]:
        rank, world_size = self.world
        micro = self._batch[1]
        count = slots_of(extent.count, micro)
        self._check_shares(count, world_size, extent.count == self._most_samples)
        mine = owned(count, rank, world_size)
        end = extent.start + extent.count
        first = extent.start + mine.start * micro
        ids = self.ids(epoch, first, min(extent.start + mine.stop * micro, end))
        slots = []
        for index in mine:
            part = ids[(index - mine.start) * micro : (index - mine.start + 1) * micro]
            slots.append(Slot(index, part, len(part) / extent.count))
        missing = most_owned(count, world_size) - len(slots) if self.uneven == "ghost" else 0
        if missing:
            # a ghost has a full micro-batch of real samples, so that its shapes and collectives are the same as usual
            ghost = self.ids(epoch, extent.start, min(extent.start + micro, end))
            slots += [Slot(GHOST, ghost, 0.0)] * missing
        return slots

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the sample numbers at places `start` up to, but not including, `stop` of an epoch."""
        places = np.arange(start, stop, dtype=np.int64)
        if self._segment is not None:
            found = ids_of_mixture(places, self._segment, self.source.lengths, self._order, self.seed)
        elif self.length is None:
            found = places
        else:
            found = ids_at(places, self.length, self._order, self.seed, 0, epoch)
        ids: list[int] = found.tolist()
        return ids

    # --- changes --------------------------------------------------------------------------------

    def ack(self, step: Any = None) -> None:
        """Advance the saved position past the next step. Call after the optimizer has made the step.

        `step`: the step's number, or the loader's `Step`, to check that it is the next step. If `step` is None, nothing
        is checked.

        Raises:
            JobFailedError: `step` is not the next step, or was planned before the sampler was changed.
        """
        number = step if isinstance(step, int) else step.cursor.step + 1 if step is not None else self.cursor.step + 1
        if number != self.cursor.step + 1:
            raise JobFailedError(
                f"step {number} was acknowledged, but the next step is {self.cursor.step + 1}",
                hint="Acknowledge each step once, in order, after optimizer.step().",
            )
        if step is not None and not isinstance(step, int):
            if step.version != self.version:
                raise JobFailedError(
                    f"step {number} was planned before the sampler was changed",
                    hint="Change world, batch or weights after ack(), before the loader yields the next step.",
                )
            self.cursor = step.after
        else:
            self.cursor = self.plan(self.cursor).after
        self.unacknowledged = 0

    def set_world(self, rank: int | None, world_size: int | None) -> None:
        """Set rank and world size, from the next step on. If `rank` and `world_size` are None, torch.distributed's
        values are used.

        Raises:
            JobFailedError: the rank does not exist, or uneven="error" and the slots cannot be divided equally.
        """
        given = None if rank is None and world_size is None else (rank or 0, 1 if world_size is None else world_size)
        if given is not None and (rank is None or world_size is None or not 0 <= given[0] < given[1]):
            raise JobFailedError(
                f"rank={rank} and world_size={world_size} do not fit together",
                hint="Give both, with 0 <= rank < world_size, or neither.",
            )
        if given is not None:
            self._check_shares(slots_of(self._most_samples, self._batch[1]), given[1])
        self._given, self.version = given, self.version + 1

    def set_batch(self, global_batch_size: int, micro_batch_size: int | None = None) -> None:
        """Set the batch size from the next step on."""
        micro = self._batch[1] if micro_batch_size is None else micro_batch_size
        self._batch, self.version = self._checked_batch(global_batch_size, micro), self.version + 1

    def set_weights(self, weights: Sequence[float]) -> None:
        """Set the weights of the mixture from the next step on.

        Raises:
            JobFailedError: the source is not a mixture, or the weights are invalid.
        """
        segment = self._segment
        if segment is None or len(weights) != len(segment.weights):
            parts = 0 if segment is None else len(segment.weights)
            raise JobFailedError(
                f"set_weights: {len(weights)} weights for {parts} sources", hint="Give one weight per source."
            )
        wanted = tuple(float(weight) for weight in weights)
        quotas_of(wanted)
        place = self.cursor.place
        self._segment = Segment(place, wanted, drawn_before(place, segment, self.seed))
        self.version += 1

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the run's position in the data: a dict of numbers and text, equal on every rank."""
        return self.saved_at(self.cursor).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in `state`, which any rank of a run with any world size may have saved.

        If the saved run has changed its batch size or weights, the changed values apply, unless the script now passes
        other values as arguments than it passed to the saved run.

        Raises:
            JobFailedError: `state` belongs to other samples or to another order of samples, or is damaged.
        """
        saved = read_state(state)
        saved.check_same(self.saved_at(self.cursor))
        if self._asked == saved.asked_batch:
            self._batch = self._checked_batch(*saved.batch)
        self.cursor = saved.cursor
        if self._segment is not None and saved.segment is not None:
            asked = self.source.weights
            self._segment = saved.segment
            if asked != saved.asked_weights:
                self.set_weights(asked)
        self.version += 1

    def saved_at(self, cursor: Cursor) -> Saved:
        """Return the state to save when the step at `cursor` is the next step."""
        return Saved(
            order=name_of(self._order),
            seed=self.seed,
            fingerprint=self._fingerprint,
            cursor=cursor,
            asked_batch=self._asked,
            batch=self._batch,
            asked_weights=self.source.weights if self._segment is not None else None,
            segment=self._segment,
            length=None if self.endless else self.length,
        )

    # --- as a batch sampler ---------------------------------------------------------------------

    def __iter__(self) -> MicroBatches:
        """Return an iterator over the sample numbers of this rank's micro-batches, up to the end of the epoch."""
        if self.unacknowledged > 1:
            raise JobFailedError(
                "two epochs were read, but no step was acknowledged: the same samples would be used again",
                hint="Call ack() after each optimizer step; under StatefulDataLoader give acknowledge=False.",
            )
        return MicroBatches(self)

    def __len__(self) -> int:
        """Return the number of micro-batches that this rank has in a whole epoch."""
        if self.length is None or self.endless:
            raise TypeError("a stream or mixture has no number of batches")
        batch, micro = self.step_size, self._batch[1]
        rank, world_size = self.world
        steps = steps_per_epoch(self.length, batch, self.drop_last)
        last = min(batch, self.length - (steps - 1) * batch)
        full, tail = (self._passes(slots_of(count, micro), rank, world_size) for count in (batch, last))
        return full * (steps - 1) + tail

    def _passes(self, slots: int, rank: int, world_size: int) -> int:
        return most_owned(slots, world_size) if self.uneven == "ghost" else len(owned(slots, rank, world_size))

    # --- checks ---------------------------------------------------------------------------------

    def _check_length(self) -> None:
        if self.length is not None and not 0 < self.length <= MOST:
            raise JobFailedError(f"the source has {self.length} samples", hint="A source needs 1 to 2**62 samples.")
        if self.length is None and self._order is not None:
            raise JobFailedError(
                f"shuffle: a Stream has its own order and cannot be shuffled ({name_of(self._order)})",
                hint="Give shuffle=False.",
            )

    def _checked_batch(self, batch: int, micro: int) -> tuple[int, int]:
        if batch < 1 or micro < 1 or batch % micro:
            near = max(1, batch // max(micro, 1)) * max(micro, 1)
            raise JobFailedError(
                f"global_batch_size {batch} is not a multiple of micro_batch_size {micro}",
                hint=f"Write {near} or {near + max(micro, 1)}, or another micro_batch_size.",
            )
        if self.drop_last and self.length is not None and not self.endless and self.length < batch:
            raise JobFailedError(
                f"an epoch of {self.length} samples is smaller than a step of {batch}: drop_last would drop all of it",
                hint="Give drop_last=False or a smaller global_batch_size.",
            )
        return batch, micro

    @property
    def _most_samples(self) -> int:
        """Number of samples in the largest step: a global batch, or a whole epoch if an epoch has fewer samples."""
        return self.step_size if self.length is None or self.endless else min(self.step_size, self.length)

    def _check_shares(self, slots: int, world_size: int, full: bool = True) -> None:
        """Check that `slots` micro-batches can be divided among the ranks. `full`: whether the step has the largest
        size.

        Without this check, a rank that never gets a slot would search for its next micro-batch without end."""
        if self.uneven == "ragged" and full and slots < world_size:
            raise JobFailedError(
                f"{slots} micro-batches for {world_size} ranks: some ranks would never get one",
                hint='Choose a smaller micro_batch_size, or uneven="ghost".',
            )
        if self.uneven == "error" and slots % world_size:
            raise JobFailedError(
                f"{slots} micro-batches cannot be divided evenly among {world_size} ranks",
                hint='Choose other batch sizes (`hp-ext scales` lists them), drop_last=True, or uneven="ghost".',
            )


class MicroBatches(Iterator[list[int]]):
    """One pass over the rest of an epoch, for torch's DataLoader.

    `state_dict`, for StatefulDataLoader, returns the position after the batches that were returned so far."""

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
                "the sampler was changed while a loader iterated over it", hint="Begin a new pass over the loader."
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
            self._move()  # count the batch before it is returned: StatefulDataLoader's state includes it
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
