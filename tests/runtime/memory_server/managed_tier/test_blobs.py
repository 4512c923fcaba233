"""Which blobs are held, which are given up, and what that frees."""

from __future__ import annotations

import mmap

import pytest

from hyperpod_ext.errors import ConflictError, MemoryTierFullError, NotFoundError
from hyperpod_ext.runtime.memory_server.managed_tier.blobs import MAX_NAMESPACES, Blobs

PAGE = mmap.PAGESIZE


def make(budget_pages: int | None = None, *, usable_pages: int = 1000, ranks: int = 2, retained: int = 3) -> Blobs:
    budget = None if budget_pages is None else budget_pages * PAGE
    blobs = Blobs(budget=budget, usable_bytes=lambda: usable_pages * PAGE)
    blobs.create("job", ranks, retained)
    return blobs


def put(blobs: Blobs, rank: int, step: int, data: bytes | None = None) -> None:
    data = f"{rank}@{step}".encode() if data is None else data
    with blobs.arriving("job", rank, len(data)) as blob:
        blob.memory[:] = data
        blobs.keep("job", rank, step, blob, "meta")


def put_step(blobs: Blobs, step: int, ranks: int = 2) -> None:
    for rank in range(ranks):
        put(blobs, rank, step)


def get(blobs: Blobs, rank: int, step: int) -> bytes | None:
    try:
        with blobs.reading("job", rank, step) as blob:
            return bytes(blob.memory)
    except NotFoundError:
        return None


def steps(blobs: Blobs, rank: int) -> list[int]:
    return [step for step in range(200) if get(blobs, rank, step) is not None]


def test_a_blob_comes_back_as_it_was_put_and_the_last_one_counts() -> None:
    blobs = make()
    put(blobs, 1, 5, b"first")
    put(blobs, 1, 5, b"second")
    put(blobs, 0, 5, b"")
    assert (get(blobs, 1, 5), get(blobs, 0, 5)) == (b"second", b"")
    assert blobs.reserved_bytes == 2 * PAGE


def test_a_rank_keeps_its_newest_steps() -> None:
    blobs = make(retained=3)
    for step in (10, 20, 30, 40):
        put_step(blobs, step)
    assert steps(blobs, 0) == steps(blobs, 1) == [20, 30, 40]
    assert blobs.reserved_bytes == 6 * PAGE


def test_the_newest_complete_step_outlives_newer_incomplete_ones() -> None:
    blobs = make(retained=1)
    put_step(blobs, 10)
    for step in (20, 30, 40):
        put(blobs, 0, step)  # rank 1 fails to save, again and again
    assert steps(blobs, 0) == [10, 40]
    assert steps(blobs, 1) == [10]
    assert blobs.latest("job", 3) == [40, 10]
    put(blobs, 1, 40)
    assert blobs.latest("job", 3) == [40]
    assert blobs.reserved_bytes == 2 * PAGE


def test_a_step_that_lost_one_rank_to_retention_is_given_up_by_all() -> None:
    blobs = make(retained=2)
    for step in (10, 20):
        put_step(blobs, step)
    put(blobs, 0, 30)
    assert steps(blobs, 1) == [20]


def test_a_run_that_went_back_can_save_older_steps_than_those_held() -> None:
    blobs = make(retained=2)
    for step in (30, 40):
        put_step(blobs, step)
    put_step(blobs, 5)
    assert steps(blobs, 0) == steps(blobs, 1) == [5, 30, 40]
    put_step(blobs, 6)
    assert steps(blobs, 0) == steps(blobs, 1) == [6, 30, 40]


def test_latest_lists_the_newest_first_and_always_the_newest_complete_one() -> None:
    blobs = make(retained=9)
    put_step(blobs, 10)
    for step in (20, 30, 40):
        put(blobs, 0, step)
    assert blobs.latest("job", 9) == [40, 30, 20, 10]
    assert blobs.latest("job", 2) == [40, 10]
    assert blobs.latest("job", 1) == [10]


def test_what_was_not_kept_was_never_there() -> None:
    blobs = make()
    put(blobs, 0, 1, b"old")
    with pytest.raises(ConnectionError), blobs.arriving("job", 0, 100):
        raise ConnectionError
    assert get(blobs, 0, 1) == b"old"
    assert blobs.reserved_bytes == PAGE


def test_a_namespace_deleted_or_made_anew_takes_nothing_of_before() -> None:
    blobs = make()
    with blobs.arriving("job", 0, 100) as blob:
        blobs.reset()
        blobs.create("job", 2, 3)
        with pytest.raises(NotFoundError, match="deleted while step 1 of rank 0 was stored"):
            blobs.keep("job", 0, 1, blob, "")
    assert blobs.reserved_bytes == 0


def test_what_is_being_read_stays_until_it_is_read() -> None:
    blobs = make(retained=1)
    put_step(blobs, 1)
    with blobs.reading("job", 0, 1) as blob:
        put_step(blobs, 2)
        assert bytes(blob.memory) == b"0@1"
        assert blobs.reserved_bytes == 3 * PAGE
    assert get(blobs, 0, 1) is None
    assert blobs.reserved_bytes == 2 * PAGE


def test_deleting_frees() -> None:
    blobs = make()
    put_step(blobs, 1)
    put_step(blobs, 2)
    blobs.delete("job", 0, 1)
    assert steps(blobs, 0) == [2]
    with pytest.raises(NotFoundError, match="rank 0 has no step 1"):
        blobs.delete("job", 0, 1)
    blobs.delete_namespace("job")
    assert blobs.reserved_bytes == 0
    with pytest.raises(NotFoundError, match="no namespace"):
        blobs.delete_namespace("job")


def test_the_budget_is_reserved_before_the_bytes_come() -> None:
    blobs = make(budget_pages=3)
    put(blobs, 0, 1, b"x" * 2 * PAGE)
    full = pytest.raises(MemoryTierFullError, match=r"no room for 0\.0 MiB")
    with blobs.arriving("job", 1, PAGE), full, blobs.arriving("job", 1, 1):
        pytest.fail("there was room")
    put(blobs, 1, 1, b"y" * PAGE)


def test_a_node_without_memory_takes_nothing_more() -> None:
    blobs = make(usable_pages=3)
    full = pytest.raises(MemoryTierFullError, match="no limit of its own")
    with blobs.arriving("job", 0, 2 * PAGE), full, blobs.arriving("job", 1, 2 * PAGE):
        pytest.fail("there was room")


def test_under_a_short_budget_the_oldest_steps_make_room_but_never_the_newest_complete_one() -> None:
    blobs = make(budget_pages=5, retained=3)
    put_step(blobs, 10)
    put_step(blobs, 20)
    put_step(blobs, 30)
    assert steps(blobs, 0) == steps(blobs, 1) == [20, 30]
    with pytest.raises(MemoryTierFullError):
        put(blobs, 0, 40, b"z" * 4 * PAGE)
    assert steps(blobs, 0) == [20, 30]  # giving up 20 would not have sufficed
    put(blobs, 0, 40, b"z" * 3 * PAGE)
    assert steps(blobs, 0) == [30, 40]
    assert steps(blobs, 1) == [30]


def test_a_step_that_is_being_read_makes_no_room() -> None:
    blobs = make(budget_pages=4, retained=3)
    put_step(blobs, 10)
    put_step(blobs, 20)
    with blobs.reading("job", 0, 10), blobs.reading("job", 1, 10), pytest.raises(MemoryTierFullError):
        put(blobs, 0, 30)
    assert steps(blobs, 0) == [10, 20]
    put(blobs, 0, 30)
    assert steps(blobs, 0) == [20, 30]


def test_ranks_and_namespaces_have_bounds() -> None:
    blobs = make(ranks=2)
    with pytest.raises(ValueError, match="rank 2 is not below num_ranks=2"):
        put(blobs, 2, 1)
    with pytest.raises(ConflictError):
        blobs.create("job", 2, 3)
    for number in range(MAX_NAMESPACES - 1):
        blobs.create(f"n{number}", 1, 1)
    with pytest.raises(MemoryTierFullError):
        blobs.create("one-more", 1, 1)
