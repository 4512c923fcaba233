"""The sampler by itself: histories at size, its state, and what it refuses."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.positions import GHOST
from hyperpod_ext.runtime.data.sampler import ElasticBatchSampler
from hyperpod_ext.runtime.data.sources import Shards, Stream, fingerprint_of
from hyperpod_ext.runtime.data.world import share_of

Slots = list[tuple[int, tuple[int, ...]]]


def sampler_of(source: Any, batch: int = 12, micro: int = 2, **options: Any) -> ElasticBatchSampler:
    options.setdefault("rank", 0)
    options.setdefault("world_size", 1)
    return ElasticBatchSampler(source, global_batch_size=batch, micro_batch_size=micro, **options)


def run(n: int, batch: int, micro: int, worlds: list[tuple[int, int]], seed: int = 0) -> Slots:
    """Slots of all steps of one epoch, through worlds of (size, steps), each begun from the last one's saved state.

    The slots of each rank are its own sampler's: nothing is shared but the state.
    """
    state: dict[str, Any] | None = None
    slots: Slots = []
    for world, steps in worlds:
        ranks = [sampler_of(range(n), batch, micro, rank=rank, world_size=world, seed=seed) for rank in range(world)]
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        for _ in range(steps):
            if ranks[0].cursor.epoch:
                break
            for sampler in ranks:
                slots += [(slot.index, tuple(slot.ids)) for slot in sampler.step() if slot.index != GHOST]
                sampler.ack()
        states = [json.dumps(sampler.state_dict()) for sampler in ranks]
        assert len(set(states)) == 1
        state = json.loads(states[-1])
    return slots


def test_8_12_6_ranks_over_100003_samples_read_each_once_in_the_order_of_one_rank() -> None:
    """AWS's documented sampler repeats 24,005 of these samples and misses 6,000."""
    n, batch, micro = 100_003, 96, 4
    slots = run(n, batch, micro, [(8, 350), (12, 400), (6, 10_000)])
    ids = [one for _, part in slots for one in part]
    assert len(ids) == n
    assert sorted(ids) == [*range(n)]
    assert slots == run(n, batch, micro, [(1, 10_000)])


def histories(count: int) -> None:
    draw = random.Random(7)
    records = 0
    for _ in range(count):
        n, micro = draw.randint(1, 700), draw.randint(1, 4)
        batch, seed = micro * draw.randint(1, 16), draw.randint(0, 9)
        worlds = [(draw.randint(1, 12), draw.randint(0, 6)) for _ in range(draw.randint(1, 7))] + [(3, 10_000)]
        slots = run(n, batch, micro, worlds, seed)
        assert sorted(one for _, part in slots for one in part) == [*range(n)]
        assert slots == run(n, batch, micro, [(1, 10_000)], seed)
        records += len(slots)
    assert records > count


def test_random_histories_read_each_sample_once_in_the_order_of_one_rank() -> None:
    histories(30)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_1000_random_histories_read_each_sample_once_in_the_order_of_one_rank() -> None:
    histories(1000)


def test_state_is_small_at_any_size() -> None:
    sampler = sampler_of(Huge())
    for _ in range(50):
        sampler.ack()
    text = json.dumps(sampler.state_dict(), separators=(",", ":"))
    assert len(text) < 200
    assert sampler.state_dict()["place"] == 600


class Huge:
    """10**12 samples, none of which exists."""

    fingerprint = "huge"

    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int) -> int:
        return index


def test_a_step_is_the_same_until_it_is_acknowledged() -> None:
    sampler = sampler_of(range(100))
    first = sampler.step()
    assert sampler.step() == first
    sampler.ack(1)
    assert sampler.step() != first


@pytest.mark.parametrize("number", [0, 2, 17])
def test_another_step_than_the_next_is_not_acknowledged(number: int) -> None:
    with pytest.raises(JobFailedError, match=f"step {number} was acknowledged, but the next step is 1"):
        sampler_of(range(100)).ack(number)


def test_ghosts_keep_ranks_in_step_and_weigh_nothing() -> None:
    ranks = [sampler_of(range(100), 12, 4, rank=rank, world_size=5) for rank in range(5)]
    slots = [sampler.step() for sampler in ranks]
    assert {len(of_rank) for of_rank in slots} == {1}
    assert sorted(slot.index for of_rank in slots for slot in of_rank) == [GHOST, GHOST, 0, 1, 2]
    assert sum(slot.weight for of_rank in slots for slot in of_rank) == pytest.approx(1)
    assert {len(slot.ids) for of_rank in slots for slot in of_rank} == {4}


def test_len_is_what_a_pass_gives() -> None:
    for n, batch, micro, world, drop_last in [(103, 12, 2, 4, False), (103, 12, 2, 4, True), (7, 12, 2, 4, False)]:
        if drop_last and n < batch:
            continue
        for uneven in ("ghost", "ragged"):
            for rank in range(world):
                options = {"rank": rank, "world_size": world, "uneven": uneven, "drop_last": drop_last}
                sampler = sampler_of(range(n), batch, micro, **options)
                assert len(sampler) == len([*sampler])


# --- as torch's batch_sampler -------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_dataloader_goes_on_where_the_optimizer_was(workers: int) -> None:
    """Workers read ahead; what they hold when the job dies is read again."""
    source = torch.arange(97)
    sampler = sampler_of(source, 8, 4)
    seen: list[int] = []
    for _, batch in zip(range(6), DataLoader(source, batch_sampler=sampler, num_workers=workers), strict=False):
        seen += batch.tolist()
        if len(seen) % 8 == 0:
            sampler.ack()
    state = sampler.state_dict()
    assert state["place"] == 24
    ranks = [sampler_of(source, 8, 4, rank=rank, world_size=2) for rank in range(2)]
    for again in ranks:
        again.load_state_dict(state)
    rest = [DataLoader(source, batch_sampler=again, num_workers=0) for again in ranks]
    for batches in zip(*rest, strict=True):
        real = [batch for batch, again in zip(batches, ranks, strict=True) if again.step()[0].index != GHOST]
        seen += [one for batch in real for one in batch.tolist()]
        for again in ranks:
            again.ack()
    assert sorted(seen) == [*range(97)]


def test_epochs_that_nobody_acknowledges_are_an_error() -> None:
    sampler = sampler_of(range(20))
    assert [*sampler] == [*sampler]
    with pytest.raises(JobFailedError, match=r"no step was acknowledged"):
        iter(sampler)


def test_a_change_ends_a_pass() -> None:
    sampler = sampler_of(range(50))
    batches = iter(sampler)
    next(batches)
    sampler.set_world(0, 2)
    with pytest.raises(JobFailedError, match="changed while a loader iterated over it"):
        next(batches)


# --- state that does not fit --------------------------------------------------------------------------


class Versioned:
    def __init__(self, n: int, fingerprint: str) -> None:
        self.n, self.fingerprint = n, fingerprint

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("now", [Versioned(100, "b"), Versioned(101, "a")])
def test_samples_that_changed_under_the_run_are_refused(now: Versioned) -> None:
    state = sampler_of(Versioned(100, "a")).state_dict()
    with pytest.raises(JobFailedError, match="the samples are not those of the saved run"):
        sampler_of(now).load_state_dict(state)


@pytest.mark.parametrize(("options", "named"), [({"seed": 1}, "seed"), ({"shuffle": "block"}, "order")])
def test_another_order_is_refused(options: dict[str, Any], named: str) -> None:
    state = sampler_of(range(100)).state_dict()
    with pytest.raises(JobFailedError, match=named):
        sampler_of(range(100), **options).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"place": -1},
        {"place": 101},
        {"place": True},
        {"epoch": "0"},
        {"step": None},
        {"batch": [1, 2]},
        {"batch": [12, 2, 0, 1]},
        {"batch": "12"},
        {"mix": {"start": 0}},
        {"order": 7},
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    state = sampler_of(range(100)).state_dict() | change
    sampler = sampler_of(range(100))
    with pytest.raises(JobFailedError):
        sampler.load_state_dict(state)
    assert sampler.cursor.place == 0


@pytest.mark.parametrize("state", [{}, None, [], {"model": 1}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(JobFailedError, match="data position cannot be read"):
        sampler_of(range(100)).load_state_dict(state)


def test_batches_go_on_as_changed_unless_the_script_asks_for_others() -> None:
    first = sampler_of(range(100))
    first.set_batch(20, 5)
    same, other = sampler_of(range(100)), sampler_of(range(100), 6, 3)
    for sampler in (same, other):
        sampler.load_state_dict(first.state_dict())
    assert (same.global_batch_size, same.micro_batch_size) == (20, 5)
    assert (other.global_batch_size, other.micro_batch_size) == (6, 3)


# --- what is refused ----------------------------------------------------------------------------------


class NoLength(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(3))


class WrongLength:
    def __len__(self) -> int:
        raise TypeError("not known yet")

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            range(100),
            {"batch": 10, "micro": 4},
            "global_batch_size 10 is not a multiple of micro_batch_size 4\nWrite 8",
        ),
        (range(100), {"batch": 0, "micro": 1}, "global_batch_size 0 is not a multiple"),
        (range(5), {"drop_last": True}, "an epoch of 5 samples is smaller than a step of 12"),
        (range(0), {}, "the source has 0 samples"),
        (iter([1]), {}, "has no access to a sample by its number"),
        (NoLength(), {}, "the length of NoLength is unknown|NoLength has no access to a sample by its number"),
        (WrongLength(), {}, "the length of WrongLength is unknown: not known yet"),
        (Stream(iter, fingerprint="s"), {}, "a Stream has its own order"),  # type: ignore[arg-type]
        (range(100), {"uneven": "even"}, "uneven='even'"),
        (range(100), {"rank": 2, "world_size": 2}, "rank=2 and world_size=2 do not fit"),
        (range(100), {"rank": 0, "world_size": None}, "rank=0 and world_size=None do not fit"),
        (range(100), {"uneven": "error", "world_size": 4}, "6 micro-batches cannot be divided evenly among 4 ranks"),
        (range(100), {"uneven": "ragged", "world_size": 7}, "6 micro-batches for 7 ranks"),
        (range(3), {"uneven": "ragged", "world_size": 3}, "2 micro-batches for 3 ranks"),
        (range(100), {"uneven": "ragged", "acknowledge": False}, "would count one step less"),
    ],
)
def test_what_cannot_be_is_refused(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobFailedError, match=message):
        sampler_of(source, **options)


def test_uneven_tails_are_refused_where_uneven_is_an_error() -> None:
    sampler = sampler_of(range(13), 12, 2, world_size=3, uneven="error")
    sampler.step()
    sampler.ack()
    with pytest.raises(JobFailedError, match="1 micro-batches cannot be divided evenly among 3 ranks"):
        sampler.step()


def test_shards_are_read_whole_and_kept_for_a_while() -> None:
    reads: list[int] = []

    def read(shard: int) -> list[int]:
        reads.append(shard)
        return [100 * shard + one for one in range(10)]

    shards = Shards([10, 10, 10], read, keep=2)
    assert [shards[one] for one in (0, 9, 10, 29, 25, 11)] == [0, 9, 100, 209, 205, 101]
    assert reads == [0, 1, 2]
    with pytest.raises(JobFailedError, match="shard 0 has 10 samples, not 11"):
        Shards([11], read)[3]
    assert fingerprint_of(shards) != fingerprint_of(Shards([10, 20], read))


def test_a_world_that_lacks_ranks_makes_fewer_micro_batches_and_every_sample_still_comes_once(monkeypatch):
    """Six of each step by four ranks; three make four of them, one makes one."""
    seen: list[int] = []
    state: dict[str, Any] | None = None
    sizes = []
    try:
        for world_size, whole in ((4, None), (3, 4), (1, 4), (4, None), (4, 4)):
            share_of(whole)
            samplers = []
            for rank in range(world_size):
                monkeypatch.setenv("RANK", str(rank))
                monkeypatch.setenv("WORLD_SIZE", str(world_size))
                one = sampler_of(range(61), rank=None, world_size=None)
                if state is not None:
                    one.load_state_dict(state)
                slots = one.step()
                seen += [sample for slot in slots if slot.index != GHOST for sample in slot.ids]
                samplers.append((one, sum(slot.weight for slot in slots)))
                one.ack()
            assert sum(weight for _, weight in samplers) == pytest.approx(1.0)
            state = samplers[0][0].state_dict()
            sizes.append(len(seen))
    finally:
        share_of(None)
    assert sizes == [12, 20, 22, 34, 46]
    assert len(set(seen)) == len(seen), "none comes twice"
    assert samplers[0][0].cursor.place == len(seen), "and none is passed over"
