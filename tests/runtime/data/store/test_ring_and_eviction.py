"""What is ready is what was made; what is old makes room, and nothing that is in use."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.data import ReadyRing, TokenStore, build, evict
from hyperpod_ext.runtime.data.positions import GHOST
from hyperpod_ext.runtime.data.token_store.eviction import CachedStore, choose_evictions, nbytes_of
from hyperpod_ext.runtime.data.token_store.files import FileLock
from hyperpod_ext.runtime.data.token_store.ring import Arrays


def batch(step: int, slot: int) -> Arrays:
    return {
        "tokens": np.full((4, 100), 1000 * step + slot, np.int64),
        "mask": np.tri(5, dtype=bool),
        "weight": np.array(0.5, np.float32),
        "none": np.empty((0, 3), np.float16),
    }


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
    )


def test_a_folder_that_another_process_removes_meanwhile_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone := tmp_path / "a").mkdir()
    (tmp_path / "b").write_bytes(b"12345")
    whole, look = nbytes_of(tmp_path), os.scandir

    def removed_meanwhile(folder: Any = ".") -> Any:
        if Path(folder) == gone and gone.exists():
            gone.rmdir()
        return look(folder)

    monkeypatch.setattr(os, "scandir", removed_meanwhile)
    assert 5 <= nbytes_of(tmp_path) <= whole


class TestRing:
    def test_slots_made_by_one_world_are_ready_in_another(self, tmp_path: Path) -> None:
        ranks = [ReadyRing(tmp_path, "stream") for _ in range(2)]
        for slot in range(12):
            ranks[slot % 2].fetch(7, slot, lambda slot=slot: batch(7, slot))
        ranks = [ReadyRing(tmp_path, "stream") for _ in range(3)]  # after a resize, a slot is another rank's
        for slot in range(12):
            found = ranks[slot * 3 // 12].fetch(7, slot, lambda: pytest.fail("it is ready"))
            assert same(found, batch(7, slot))
        assert sum(rank.stats.hits for rank in ranks) == 12

    def test_streams_do_not_see_one_another(self, tmp_path: Path) -> None:
        ReadyRing(tmp_path, "seed 1").put(0, 0, batch(0, 0))
        assert ReadyRing(tmp_path, "seed 2").get(0, 0) is None
        assert ReadyRing(tmp_path, "seed/1").get(0, 0) is None

    def test_damage_is_never_given_out(self, tmp_path: Path) -> None:
        ring = ReadyRing(tmp_path, "stream")
        ring.put(3, 1, batch(3, 1))
        (file,) = ring.folder.iterdir()
        good = file.read_bytes()
        for bad in [
            b"",
            good[:10],
            good[:-1],
            *(good[:at] + b"\xff" + good[at + 1 :] for at in (0, 9, 40, len(good) - 9)),
        ]:
            file.write_bytes(bad)
            assert same(ring.fetch(3, 1, lambda: batch(3, 1)), batch(3, 1))
        assert (ring.stats.damaged, ring.stats.hits) == (7, 0)
        file.rename(ring.folder / "000000000004-000001.batch")
        assert ring.get(4, 1) is None

    def test_the_oldest_steps_make_room(self, tmp_path: Path) -> None:
        ring = ReadyRing(tmp_path, "stream", budget_bytes=20_000)  # five batches
        for step in range(10):
            ring.put(step, 0, batch(step, 0))
        assert [step for step, _ in ring.ready()] == [5, 6, 7, 8, 9]
        assert not ring.put(2, 0, batch(2, 0))
        assert [step for step, _ in ring.ready()] == [5, 6, 7, 8, 9]

    def test_ghosts_take_no_room(self, tmp_path: Path) -> None:
        ring = ReadyRing(tmp_path, "s", budget_bytes=1 << 20)
        for step in range(3):
            assert ring.fetch(step, GHOST, lambda: {"a": np.full(9, 7)})["a"].sum() == 63
        assert (list(ring.folder.iterdir()), ring.stats.made) == ([], 3)

    def test_what_is_given_out_is_this_processes_own(self, tmp_path: Path) -> None:
        ring = ReadyRing(tmp_path, "stream")
        ring.put(0, 0, batch(0, 0))
        found = ring.get(0, 0)
        assert found is not None
        found["tokens"][:] = 0
        again = ring.get(0, 0)
        assert again is not None
        assert same(again, batch(0, 0))

    def test_objects_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="nothing is pickled"):
            ReadyRing(tmp_path, "stream").put(0, 0, {"x": np.array([{}])})

    def test_streams_that_nobody_uses_are_removed(self, tmp_path: Path) -> None:
        old = ReadyRing(tmp_path, "old")
        old.put(0, 0, batch(0, 0))
        os.utime(old.folder, (0, 0))
        new = ReadyRing(tmp_path, "new")
        assert [path.name for path in tmp_path.iterdir()] == [new.folder.name]


@given(
    stores=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 10)), max_size=8),
    budget=st.integers(0, 300),
    keep=st.sets(st.integers(0, 7)),
)
def test_no_more_is_evicted_than_must_be(stores: list[tuple[int, int]], budget: int, keep: set[int]) -> None:
    held = [CachedStore(Path(str(n)), nbytes, used) for n, (nbytes, used) in enumerate(stores)]
    kept = [Path(str(n)) for n in keep]
    gone = choose_evictions(held, budget, kept)
    assert not set(gone) & set(kept)
    sizes = {each.folder: each.nbytes for each in held}
    left = sum(sizes.values()) - sum(sizes[path] for path in gone)
    assert left <= budget or {each.folder for each in held} <= set(gone) | set(kept)
    assert not gone or left + sizes[gone[-1]] > budget
    times = {each.folder: each.used_at for each in held}
    spared = [times[each.folder] for each in held if each.folder not in gone and each.folder not in kept]
    assert all(times[path] <= min(spared, default=10) for path in gone)


class TestEviction:
    @pytest.fixture
    def folders(self, tmp_path: Path) -> list[Path]:
        found = []
        for number in range(3):
            (tmp_path / f"{number}.txt").write_text(f"{number}" * 10_000)
            store = build(tmp_path / f"{number}.txt", place=tmp_path / "stores")
            found.append(store.folder)
            store.close()
            os.utime(store.folder / "readers", (number, number))
        return found

    def test_the_least_recently_used_goes_first(self, folders: list[Path], tmp_path: Path) -> None:
        TokenStore(folders[0]).close()  # used now
        assert evict(tmp_path / "stores", 40_000) == [folders[1]]
        assert sorted(tmp_path.glob("stores/*")) == sorted([folders[0], folders[2]])

    def test_what_is_read_or_written_stays(self, folders: list[Path], tmp_path: Path) -> None:
        reading = TokenStore(folders[0])
        writing = FileLock(folders[1] / "lock")
        assert writing.acquire()
        assert evict(tmp_path / "stores", 0) == [folders[2]]
        reading.close()
        writing.release()
        assert evict(tmp_path / "stores", 0) == [folders[1], folders[0]]  # which was opened later

    def test_arrays_outlive_their_files(self, folders: list[Path], tmp_path: Path) -> None:
        store = TokenStore(folders[0])
        view = store[0]
        store.close()
        assert folders[0] in evict(tmp_path / "stores", 0)
        assert view.tobytes() == b"0" * 10_000
        with pytest.raises(NotFoundError):
            TokenStore(folders[0])

    def test_an_eviction_that_was_killed_is_finished_by_the_next(self, folders: list[Path], tmp_path: Path) -> None:
        folders[0].rename(tmp_path / "stores" / ".evicted-0-abcd")
        assert evict(tmp_path / "stores", 1 << 30) == []
        assert not list(tmp_path.glob("stores/.*"))

    def test_a_budget_makes_room_for_a_new_store(self, folders: list[Path], tmp_path: Path) -> None:
        (tmp_path / "new.txt").write_text("n" * 10_000)
        TokenStore(folders[0]).close()
        start = time.monotonic()
        store = build(tmp_path / "new.txt", place=tmp_path / "stores", budget_bytes=50_000)
        assert store.folder.exists()
        assert folders[0].exists()
        assert not folders[1].exists()
        assert time.monotonic() - start < 30


def test_a_ring_serves_the_sampler_through_a_resize(tmp_path: Path) -> None:
    from hyperpod_ext.runtime.data import ElasticBatchSampler

    source = [np.full(3, number) for number in range(100)]
    made: list[tuple[int, int]] = []
    for world_size in (2, 3):  # the same first step, before and after
        for rank in range(world_size):
            arguments = {"global_batch_size": 24, "micro_batch_size": 2, "rank": rank, "world_size": world_size}
            ring = ReadyRing(tmp_path, "stream")
            for slot in ElasticBatchSampler(source, **arguments).step():
                wanted = np.stack([source[number] for number in slot.ids])

                def make(key: tuple[int, int] = (world_size, slot.index), wanted: np.ndarray = wanted) -> Arrays:
                    made.append(key)
                    return {"x": wanted}

                assert np.array_equal(ring.fetch(0, slot.index, make)["x"], wanted)
    assert sorted(made) == [(2, index) for index in range(12)]
