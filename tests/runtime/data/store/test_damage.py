"""Bytes that are not those that were written are never read: found, named, and built again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hyperpod_ext.errors import CorruptSegmentError
from hyperpod_ext.runtime.data import Packed, TokenStore, build
from hyperpod_ext.runtime.data.convert.check import check, drop_from
from hyperpod_ext.runtime.data.token_store.segment import BLOCK_BYTES, HEADER_BYTES

DOCUMENT = 1000
DOCUMENTS = 2000


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    letters = rng.integers(97, 123, (DOCUMENTS, DOCUMENT - 1), dtype=np.uint8)
    file = tmp_path / "letters.txt"
    file.write_bytes(b"".join(row.tobytes() + b"\n" for row in letters))
    return file


@pytest.fixture
def store(dataset: Path, tmp_path: Path) -> Path:
    return build(dataset, place=tmp_path / "stores", split="lines", segment_bytes=1 << 20).folder


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def read_all(store: Path) -> int:
    return sum(int(document.sum()) for document in TokenStore(store))


def test_every_single_place_is_covered_by_a_checksum(store: Path) -> None:
    good = read_all(store)
    path = store / "seg-000001.tokens"
    size = path.stat().st_size
    padding = range(HEADER_BYTES // 4, HEADER_BYTES)  # zeros after the header; nobody reads them
    places = [
        *range(0, 40, 7),
        200,
        HEADER_BYTES,
        size - 1,
        *np.linspace(HEADER_BYTES, size - 1, 15).astype(int).tolist(),
    ]
    assert not set(places) & set(padding)
    for at in places:
        flip(path, at)
        with pytest.raises(CorruptSegmentError, match=r"seg-000001\.tokens"):
            read_all(store)
        assert check(store).problems
        flip(path, at)
    assert read_all(store) == good


def test_a_batch_that_is_read_at_once_is_checked_first(store: Path) -> None:
    flip(store / "seg-000001.tokens", HEADER_BYTES + BLOCK_BYTES + 5)
    packed = Packed(TokenStore(store), 99)
    segment = packed._store.segments[1]
    first = packed._store.segments[0].info.tokens
    damaged = (first + BLOCK_BYTES) // 99 + 10
    assert packed.batch([damaged - 2000]).shape == (1, 100)  # in an earlier block of the same segment
    assert segment.damage()
    for numbers in ([damaged], [damaged - 2000, damaged], [0, damaged]):
        for _ in range(2):
            with pytest.raises(CorruptSegmentError, match=r"seg-000001\.tokens: bytes"):
                packed.batch(numbers)


def test_damage_is_named_with_its_bytes_and_what_to_do(store: Path) -> None:
    flip(store / "seg-000000.tokens", HEADER_BYTES + 2 * BLOCK_BYTES + 5)
    opened = TokenStore(store)
    assert len(opened[0]) == DOCUMENT  # what is whole can be read
    begin = HEADER_BYTES + 2 * BLOCK_BYTES
    wanted = (
        rf"seg-000000\.tokens: bytes {begin} to {begin + BLOCK_BYTES} do not match(.|\n)*--drop-damaged(.|\n)*build"
    )
    with pytest.raises(CorruptSegmentError, match=wanted):
        opened[2 * BLOCK_BYTES // DOCUMENT + 1]


@pytest.mark.parametrize("left", [0, 100, HEADER_BYTES, HEADER_BYTES + 1, 1_000_000])
def test_a_segment_that_was_cut_off_is_an_error_and_never_a_signal(store: Path, left: int) -> None:
    with (store / "seg-000001.tokens").open("r+b") as file:
        file.truncate(left)
    with pytest.raises(CorruptSegmentError, match=r"seg-000001\.tokens: "):
        TokenStore(store)


def test_a_segment_that_is_missing_is_an_error(store: Path) -> None:
    (store / "seg-000001.tokens").unlink()
    with pytest.raises(CorruptSegmentError, match=r"seg-000001\.tokens is missing"):
        TokenStore(store)
    assert [problem.message for problem in check(store).problems] == ["is missing"]


def test_segments_of_another_store_do_not_pass(store: Path, dataset: Path, tmp_path: Path) -> None:
    dataset.write_bytes(dataset.read_bytes().upper())
    other = build(dataset, place=tmp_path / "stores", split="lines", segment_bytes=1 << 20).folder
    (store / "seg-000001.tokens").write_bytes((other / "seg-000001.tokens").read_bytes())
    with pytest.raises(CorruptSegmentError, match="its segments have fingerprint"):
        TokenStore(store)


def test_what_is_dropped_is_built_again_as_it_was(store: Path, dataset: Path) -> None:
    before = TokenStore(store).fingerprint
    flip(store / "seg-000001.tokens", HEADER_BYTES + 7)
    found = check(store)
    assert found.first_damaged == 1
    assert drop_from(store, 1) == ["seg-000001.tokens"]
    again = build(dataset, place=store.parent, split="lines", segment_bytes=1 << 20)
    assert (again.folder, again.fingerprint) == (store, before)


def test_a_damaged_record_of_the_whole_is_dropped_alone(store: Path, dataset: Path) -> None:
    before = TokenStore(store).fingerprint
    (store / "store.json").write_text("{")
    with pytest.raises(CorruptSegmentError, match=r"store\.json: not JSON"):
        TokenStore(store)
    found = check(store)
    assert found.first_damaged == 2
    assert drop_from(store, 2) == []
    assert build(dataset, place=store.parent, split="lines", segment_bytes=1 << 20).fingerprint == before


def test_a_document_of_two_blocks_is_read_only_if_both_are_whole(store: Path) -> None:
    across = BLOCK_BYTES // DOCUMENT
    assert across * DOCUMENT < BLOCK_BYTES < (across + 1) * DOCUMENT
    flip(store / "seg-000000.tokens", HEADER_BYTES + BLOCK_BYTES)
    opened = TokenStore(store)
    assert len(opened[0]) == DOCUMENT  # the first block has been looked at now
    with pytest.raises(CorruptSegmentError, match=rf"bytes {HEADER_BYTES + BLOCK_BYTES} to"):
        opened[across]
