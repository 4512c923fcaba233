"""Samples of one length, against lists."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hyperpod_ext.errors import ConfigError, CorruptSegmentError, UnknownLengthError
from hyperpod_ext.runtime.data import Packed, TensorSource, TokenStore
from hyperpod_ext.runtime.data.token_store.packed import unsplit_begins
from hyperpod_ext.runtime.data.token_store.writer import StoreWriter

ABOUT: dict[str, Any] = {"source": []}
LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=25)


def write(folder: Path, lengths: list[int], segment_bytes: int = 20) -> TokenStore:
    """Tokens are their own places in the row of all."""
    first = 0
    with StoreWriter(folder, ABOUT, segment_bytes=segment_bytes) as writer:
        for length in lengths:
            writer.append(np.arange(first, first + length), {})
            first += length
        writer.finish({})
    return TokenStore(folder)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 12), segment_bytes=st.integers(1, 60))
def test_split_samples_are_the_row_of_all_tokens_each_predicted_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, segment_bytes: int
) -> None:
    assume(sum(lengths) > length)
    packed = Packed(write(tmp_path_factory.mktemp("s"), lengths, segment_bytes), length)
    samples = [packed[number].tolist() for number in range(len(packed))]
    assert samples == [list(range(i * length, (i + 1) * length + 1)) for i in range((sum(lengths) - 1) // length)]
    assert packed.batch(range(len(packed))).tolist() == samples
    rng = np.random.default_rng(len(samples))
    for _ in range(3):  # from one segment or from many
        numbers = rng.integers(-len(packed), len(packed), int(rng.integers(1, 4)))
        assert packed.batch(numbers, dtype=None).tolist() == [samples[number] for number in numbers]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for number in range(len(packed)):
        begin = number * length
        inside = {int(start) - begin for start in starts[:-1] if begin < start < begin + length + 1}
        assert packed.boundaries(number).tolist() == sorted({0} | inside)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, size=st.integers(2, 12))
def test_whole_documents_are_cut_only_where_they_must(lengths: list[int], size: int) -> None:
    assume(sum(lengths) > 0)
    starts = np.cumsum([0, *lengths[:-1]])
    begins, filled, at = [0], 0, 0
    for length in lengths:
        for piece in [min(size, length - done) for done in range(0, length, size)]:
            if filled + piece > size:
                begins.append(at)
                filled = 0
            filled, at = filled + piece, at + piece
    assert unsplit_begins(starts, sum(lengths), size).tolist() == [*begins, sum(lengths)]


def test_whole_documents_are_padded_and_the_index_is_made_once(tmp_path: Path) -> None:
    store = write(tmp_path / "s", [3, 2, 4, 1])
    packed = Packed(store, 5, documents="whole", pad=99)
    assert [packed[number].tolist() for number in range(len(packed))] == [[0, 1, 2, 3, 4, 99], [5, 6, 7, 8, 9, 99]]
    assert packed.batch([1]).tolist() == [[5, 6, 7, 8, 9, 99]]
    (index,) = (store.folder / "packed").iterdir()
    before = index.stat().st_mtime_ns
    assert Packed(store, 5, documents="whole", pad=99).batch([0]).tolist() == [[0, 1, 2, 3, 4, 99]]
    assert index.stat().st_mtime_ns == before
    index.write_bytes(bytes(len(index.read_bytes())))
    with pytest.raises(CorruptSegmentError, match="Delete it"):
        Packed(store, 5, documents="whole", pad=99)


def test_a_sample_within_a_segment_is_a_view(tmp_path: Path) -> None:
    packed = Packed(write(tmp_path / "s", [50], segment_bytes=1000), 8)
    assert np.shares_memory(packed[2], packed[3])  # the one token that both have
    assert TensorSource(packed)[2].tolist() == list(range(16, 25))


@pytest.mark.parametrize("documents", ["split", "whole"])
@pytest.mark.parametrize("segment_bytes", [20, 1000])
def test_a_batch_is_a_copy_as_stored_or_as_asked_for(tmp_path: Path, documents: str, segment_bytes: int) -> None:
    packed = Packed(write(tmp_path / "s", [30, 21], segment_bytes), 8, documents=documents)
    stored = packed.batch([2, 0], dtype=None)
    assert stored.dtype == np.uint8
    assert stored.tolist() == [packed[2].tolist(), packed[0].tolist()]
    assert packed.batch(np.array([2, 0])).dtype == np.int64
    stored[:] = 77
    assert packed[2][0] != 77
    assert packed.batch([]).shape == packed.batch([], dtype=None).shape == (0, 9)
    assert packed.batch(np.array([2, 0], np.uint8), dtype=None).shape == (2, 9)
    with pytest.raises(TypeError, match="float"):
        packed.batch([1.5])  # type: ignore[list-item]
    for beyond in (len(packed), -len(packed) - 1):
        with pytest.raises(IndexError, match=f"sample {beyond} of {len(packed)}"):
            packed.batch([0, beyond])


def test_a_micro_batch_is_read_at_once_and_is_what_single_samples_are(tmp_path: Path) -> None:
    source = TensorSource(Packed(write(tmp_path / "s", [50], segment_bytes=20), 8))
    rows = source.__getitems__([4, 1])
    assert [row.tolist() for row in rows] == [source[4].tolist(), source[1].tolist()]
    assert rows[0].dtype == source[4].dtype
    documents = TensorSource(write(tmp_path / "t", [3, 5]))
    assert [row.tolist() for row in documents.__getitems__([1, 0])] == [[3, 4, 5, 6, 7], [0, 1, 2]]


@pytest.mark.parametrize("pad", [-100, 70_000])
def test_padding_that_tokens_have_no_room_for_makes_them_wider(tmp_path: Path, pad: int) -> None:
    """-100 is what a loss passes by, and tokens have no sign."""
    packed = Packed(write(tmp_path / "s", [3, 6, 2]), 5, documents="whole", pad=pad)
    rows = packed.batch(range(3), dtype=None)
    assert [row.tolist() for row in rows] == [packed[number].tolist() for number in range(3)]
    assert rows[0].tolist() == [0, 1, 2, pad, pad, pad]
    assert {packed[number].dtype for number in range(3)} == {rows.dtype}, "a full sample, too"


def test_fingerprints_tell_every_difference_and_survive_pickling(tmp_path: Path) -> None:
    store = write(tmp_path / "s", [30, 20])
    kinds: list[dict[str, Any]] = [{}, {"documents": "whole"}, {"documents": "whole", "pad": 1}]
    packs = [Packed(store, 8, **kind) for kind in kinds] + [Packed(store, 9)]
    assert len({packed.fingerprint for packed in packs}) == 4
    assert pickle.loads(pickle.dumps(packs[2])).fingerprint == packs[2].fingerprint


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only 3 tokens, but one sample needs 4"):
        Packed(write(tmp_path / "s", [3]), 3)
    with pytest.raises(ConfigError, match="split or whole"):
        Packed(write(tmp_path / "t", [3]), 2, documents="halves")
    with StoreWriter(tmp_path / "g", ABOUT) as writer:
        writer.append(np.arange(9), {})
        writer.publish()
        with pytest.raises(UnknownLengthError):
            Packed(TokenStore(tmp_path / "g"), 2)
