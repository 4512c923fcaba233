"""ElasticDataLoader: reads steps of micro-batches ahead. A restore continues exactly after the optimizer's last step.

loader = ElasticDataLoader(dataset, global_batch_size=512, micro_batch_size=8)
run.restore(model=model, optimizer=optimizer, data=loader)
for _, step in zip(run.steps(1000), loader.steps()):
    for batch, weight in step:
        (loss_of(batch) * weight * run.world_size).backward()
    optimizer.step()
    loader.ack(step)
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.fetching import Collate, Fetch, Fetched, OnError, Skipped, default_collate
from hyperpod_ext.runtime.data.positions import Cursor, Slot, StepPlan
from hyperpod_ext.runtime.data.sampler import ElasticBatchSampler, Uneven
from hyperpod_ext.runtime.data.shuffle import Shuffle
from hyperpod_ext.runtime.data.sources import Stream
from hyperpod_ext.runtime.data.workers import Read, in_processes, in_this_thread, in_threads


@dataclass(frozen=True)
class Step:
    """This rank's micro-batches of one optimizer step. Iterating over a `Step` yields pairs (micro-batch, weight)."""

    number: int
    """Number of the step, counted from 1 over the whole run."""
    epoch: int
    samples: int
    """Number of samples in the step, over all ranks."""
    micro_batches: list[Any] = field(repr=False)
    weights: list[float]
    """Share of the step's samples in each micro-batch; 0.0 for a ghost (an extra micro-batch that does not count). The
    weights of all ranks sum to 1, less the share of skipped samples."""
    slots: list[Slot] = field(repr=False)
    skipped: tuple[Skipped, ...]
    """Samples of the step that this rank could not read. The share of skipped samples is missing from the sum of all
    weights."""
    cursor: Cursor = field(repr=False)
    after: Cursor = field(repr=False)
    version: int = field(repr=False)

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        return zip(self.micro_batches, self.weights, strict=True)

    def __len__(self) -> int:
        return len(self.micro_batches)


class ElasticDataLoader:
    """Reads the steps that an `ElasticBatchSampler` plans. Accepts the arguments of `ElasticBatchSampler`, and these:

    Args:
        collate: converts a list of samples to a micro-batch; None for torch's default collate function.
        workers: number of processes or threads (`worker_kind`) that read `prefetch` steps ahead; 0 reads each step on
            demand.
        on_error: `fail` ends the job if a sample cannot be read, with an error that names the sample. `skip` leaves
            the sample out, logs it, and adds it to `skipped`.
        most_skipped: with `skip`, the job ends when one process has skipped more samples than this number.

    Random numbers that a sample draws (from Python, numpy or torch) depend only on seed, step and micro-batch. Random
    numbers are equal on any rank, at any world size, and when a step is repeated. Random numbers may differ in worker
    threads, which share one generator state.
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
        collate: Collate | None = None,
        workers: int = 0,
        worker_kind: Literal["process", "thread"] = "process",
        prefetch: int = 2,
        start_method: Literal["fork", "spawn", "forkserver"] | None = None,
        on_error: OnError = "fail",
        most_skipped: int = 1000,
    ) -> None:
        if workers < 0 or prefetch < 1 or worker_kind not in ("process", "thread") or on_error not in ("fail", "skip"):
            raise JobFailedError(
                f"an argument of the loader is not valid: workers={workers}, prefetch={prefetch}, "
                f"worker_kind={worker_kind!r}, on_error={on_error!r}",
                hint='Give workers >= 0, prefetch >= 1, worker_kind "process" or "thread", on_error "fail" or "skip".',
            )
        self.source = source
        self.sampler = ElasticBatchSampler(
            source,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            uneven=uneven,
            fingerprint=fingerprint,
        )
        self.skipped: list[Skipped] = []
        """All samples that this process has skipped, because they could not be read."""
        self._collate = collate
        self._fetch = Fetch(source, collate, seed, on_error)
        self._workers, self._kind, self._prefetch, self._start_method = workers, worker_kind, prefetch, start_method
        self._most_skipped = most_skipped

    def steps(self, epochs: int | None = None) -> Generator[Step]:
        """Yield the remaining steps of the run: without end, or until `epochs` epochs are complete.

        The caller must acknowledge each step (`ack`) before the next step. Changes by `set_world`, `set_batch`,
        `set_weights`, `load_state_dict`, or of torch.distributed's world take effect at the next step; steps that were
        read ahead are read again.

        Raises:
            JobFailedError: a sample cannot be read, or a step was not acknowledged.
        """
        if epochs is not None and self.sampler.endless:
            raise JobFailedError(
                f"steps(epochs={epochs}): a mixture has no end", hint="Count steps instead: zip(run.steps(n), ...)."
            )
        while True:
            planned_for, reading = (self.sampler.version, self.sampler.world), self._read(epochs)
            try:
                for plan, fetched in reading:
                    yield self._step(plan, fetched)
                    if (self.sampler.version, self.sampler.world) != planned_for:
                        break
                    if self.sampler.cursor.step == plan.cursor.step:
                        raise JobFailedError(
                            f"step {plan.cursor.step + 1} was not acknowledged: after a fault it would be repeated",
                            hint="Call loader.ack(step) after optimizer.step().",
                        )
                else:
                    return
            finally:
                reading.close()

    def __iter__(self) -> Generator[Step]:
        """Yield the remaining steps of this epoch."""
        if self.sampler.endless:
            return self.steps()
        return self.steps(self.sampler.plan(self.sampler.cursor).cursor.epoch + 1)

    def ack(self, step: Step) -> None:
        """Advance the saved position past `step`. Call after the optimizer has made `step`."""
        self.sampler.ack(step)

    def set_world(self, rank: int | None, world_size: int | None) -> None:
        """Set rank and world size. See `ElasticBatchSampler.set_world`."""
        self.sampler.set_world(rank, world_size)

    def set_batch(self, global_batch_size: int, micro_batch_size: int | None = None) -> None:
        """Set the batch size. See `ElasticBatchSampler.set_batch`."""
        self.sampler.set_batch(global_batch_size, micro_batch_size)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Set the weights of a mixture. See `ElasticBatchSampler.set_weights`."""
        self.sampler.set_weights(weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the run's position in the data: a small dict, equal on every rank."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. See `ElasticBatchSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)

    # --- reading --------------------------------------------------------------------------------

    def _read(self, epochs: int | None) -> Generator[Read]:
        if isinstance(self.source, Stream):
            return self._read_stream(self.source, epochs)
        plans = self._plans(epochs)
        if self._workers == 0:
            return in_this_thread(self._fetch, plans)
        if self._kind == "thread":
            return in_threads(self._fetch, plans, self._workers, self._prefetch)
        return in_processes(self._fetch, plans, self._workers, self._prefetch, self._start_method)

    def _plans(self, epochs: int | None) -> Iterator[StepPlan]:
        cursor = self.sampler.cursor
        while True:
            plan = self.sampler.plan(cursor)
            if epochs is not None and plan.cursor.epoch >= epochs:
                return
            yield plan
            cursor = plan.after

    def _read_stream(self, source: Stream, epochs: int | None) -> Generator[Read]:
        """Read a stream's steps. Every rank reads every sample of the stream, so all ranks end at the same step."""
        cursor = self.sampler.cursor
        samples: Iterator[Any] | None = None
        while epochs is None or cursor.epoch < epochs:
            batch = self.sampler.step_size
            here = f"step {cursor.step + 1}, epoch {cursor.epoch}, sample {cursor.place} of the stream and after"
            try:
                samples = iter(source.open(cursor.place)) if samples is None else samples
                read = list(islice(samples, batch))
            except Exception as error:
                raise JobFailedError(
                    f"{here}: {type(error).__name__}: {error}",
                    hint="Repair the stream; the job continues with this step.",
                ) from error
            if len(read) < (batch if self.sampler.drop_last else 1):
                if cursor.place == 0:
                    raise JobFailedError(
                        f"{here}: the stream has only {len(read)} samples, too few for one step",
                        hint="Give a stream with more samples.",
                    )
                # only the loader knows where the stream ends, so it sets the cursor from which the next call starts
                self.sampler.cursor = cursor = Cursor(cursor.epoch + 1, 0, cursor.step)
                samples = None
                continue
            plan = self.sampler.plan(cursor, available=len(read))
            start = plan.extent.start
            yield plan, [self._collated([read[one - start] for one in slot.ids]) for slot in plan.slots]
            if plan.after.epoch != cursor.epoch:
                samples = None
            cursor = plan.after

    def _collated(self, samples: list[Any]) -> Fetched:
        return Fetched((self._collate or default_collate())(samples), len(samples))

    def _step(self, plan: StepPlan, fetched: list[Fetched]) -> Step:
        number = plan.cursor.step + 1
        rank = self.sampler.world[0]
        for slot, one in zip(plan.slots, fetched, strict=True):
            if one.failure:
                raise JobFailedError(
                    f"step {number}, micro-batch {slot.index}, rank {rank}: {one.failure}",
                    hint='Repair the data, or leave unreadable samples out: on_error="skip".',
                )
        skipped = tuple(lost for one in fetched for lost in one.skipped)
        for lost in skipped:
            sys.stderr.write(f"hyperpod_ext: step {number}, rank {rank}: sample {lost.id} left out: {lost.error}\n")
        self.skipped += skipped
        if len(self.skipped) > self._most_skipped:
            raise JobFailedError(
                f"step {number}, rank {rank}: {len(self.skipped)} samples could not be read, "
                f"the last is {self.skipped[-1].id}: {self.skipped[-1].error}",
                hint="Repair the data, or raise most_skipped.",
            )
        weights = [
            slot.weight * one.kept / len(slot.ids) if one.kept != len(slot.ids) else slot.weight
            for slot, one in zip(plan.slots, fetched, strict=True)
        ]
        return Step(
            number=number,
            epoch=plan.cursor.epoch,
            samples=plan.extent.count,
            micro_batches=[one.batch for one in fetched],
            weights=weights,
            slots=plan.slots,
            skipped=skipped,
            cursor=plan.cursor,
            after=plan.after,
            version=plan.version,
        )
