"""What a store gives back, who may write it, and what it says while it grows."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_ext.errors import (
    ConflictError,
    DatasetChangedError,
    HyperpodExtError,
    NotFoundError,
    UnknownLengthError,
    WaitTimeoutError,
)
from hyperpod_ext.runtime.data import TensorSource, TokenStore, build
from hyperpod_ext.runtime.data.token_store.files import FileLock
from hyperpod_ext.runtime.data.token_store.writer import StoreWriter

ABOUT: dict[str, Any] = {"source": [], "tokenizer": "test"}


def write(folder: Path, documents: list[list[int]], **options: Any) -> TokenStore:
    with StoreWriter(folder, ABOUT, **options) as writer:
        for number, document in enumerate(documents):
            writer.append(np.array(document, dtype=np.int64), {"record": number + 1})
        writer.finish({})
    return TokenStore(folder)


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 2**40), max_size=30), min_size=1, max_size=30),
    segment_bytes=st.integers(1, 400),
    largest=st.sampled_from([200, 60_000, 2**31, 2**40]),
)
def test_documents_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], segment_bytes: int, largest: int
) -> None:
    documents = [[token % (largest + 1) for token in document] for document in documents]
    store = write(tmp_path_factory.mktemp("store"), documents, segment_bytes=segment_bytes)
    assert [store[i].tolist() for i in range(len(store))] == documents
    assert [each.tolist() for each in store] == documents
    row = [token for document in documents for token in document]
    assert store.tokens == len(row)
    for begin in range(0, len(row) + 1, 7):
        assert store.read(begin, min(begin + 11, len(row))).tolist() == row[begin : begin + 11]


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, "uint8"), (256, "uint16"), (65_535, "uint16"), (65_536, "uint32")]
)
def test_tokens_take_the_smallest_type_that_holds_them(tmp_path: Path, largest: int, dtype: str) -> None:
    assert write(tmp_path / "s", [[0, 1], [largest]])[0].dtype == dtype


def test_reads_are_views_that_cannot_be_written(tmp_path: Path) -> None:
    store = write(tmp_path / "s", [[1, 2, 3], [4]])
    assert not store[0].flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        store[0][0] = 9


def test_a_tensor_shares_the_mapping_and_keeps_what_is_written_to_itself(tmp_path: Path) -> None:
    store = write(tmp_path / "s", [[1, 2, 3], [4]])
    tensor = TensorSource(store)[0]
    assert tensor.data_ptr() == store[0].ctypes.data
    tensor[0] = 9
    assert store[0][0] == 9  # this process' own page
    assert TokenStore(store.folder)[0].tolist() == [1, 2, 3]  # neither the file nor another mapping
    assert torch.stack([TensorSource(store)[1].long()]).tolist() == [[4]]


@pytest.mark.parametrize("tokens", [[[-1]], [[0.5]], [[[1], [2]]]])
def test_what_are_no_tokens_is_refused_with_its_document(tmp_path: Path, tokens: list[Any]) -> None:
    with StoreWriter(tmp_path / "s", ABOUT) as writer, pytest.raises(HyperpodExtError, match="document 0"):
        writer.append(np.array(tokens[0]), {})


def test_a_token_beyond_the_declared_vocabulary_is_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", ABOUT, vocab_size=256) as writer:
        writer.append(np.array([255]), {})
        with pytest.raises(HyperpodExtError, match="document 1: token 256"):
            writer.append(np.array([256]), {})


def test_only_one_may_write_and_the_next_goes_on(tmp_path: Path) -> None:
    first = StoreWriter(tmp_path / "s", ABOUT, segment_bytes=4)
    for number in range(5):
        first.append(np.arange(3), {"record": number + 1})
    with pytest.raises(ConflictError, match="another process"):
        StoreWriter(tmp_path / "s", ABOUT)
    first.close()
    with StoreWriter(tmp_path / "s", ABOUT, segment_bytes=4) as second:
        assert second.position == {"record": 4}  # the fifth was waiting, and is read again
        assert second.documents == 4


def test_a_forked_child_neither_frees_the_lock_nor_keeps_it(tmp_path: Path) -> None:
    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert lock.acquire()
    go = os.pipe()
    for frees in (True, False):
        pid = os.fork()
        if pid == 0:
            if frees:
                lock.release()
            else:
                os.read(go[0], 1)
            os._exit(0)
        if frees:
            os.waitpid(pid, 0)
            assert not other.acquire()
    lock.release()
    assert other.acquire()  # while the second child has the file open
    os.write(go[1], b"1")
    os.waitpid(pid, 0)


class TestGrowing:
    @pytest.fixture
    def writer(self, tmp_path: Path) -> StoreWriter:
        writer = StoreWriter(tmp_path / "s", ABOUT)
        for number in range(4):
            writer.append(np.full(3, number), {"record": number + 1})
        writer.publish()
        return writer

    def test_it_has_no_length_yet_and_says_what_can_be_done(self, writer: StoreWriter) -> None:
        store = TokenStore(writer.folder)
        assert (store.finished, store.available) == (False, 4)
        with pytest.raises(UnknownLengthError, match=r"no length yet(.|\n)*store\.prefix"):
            len(store)
        with pytest.raises(UnknownLengthError, match="no fingerprint yet"):
            _ = store.fingerprint

    def test_a_sampler_refuses_it_and_takes_its_prefix(self, writer: StoreWriter) -> None:
        from hyperpod_ext.runtime.data import ElasticBatchSampler

        store = TokenStore(writer.folder)
        with pytest.raises(UnknownLengthError):
            ElasticBatchSampler(store, global_batch_size=2, micro_batch_size=1, rank=0, world_size=1)
        part = store.prefix()
        sampler = ElasticBatchSampler(part, global_batch_size=2, micro_batch_size=1, rank=0, world_size=1)
        seen = [number for slot in sampler.step() for number in slot.ids]
        assert len(seen) == 2
        assert all(part[number].tolist() == [number] * 3 for number in seen)

    def test_a_prefix_stays_as_it_is_while_the_store_goes_on(self, writer: StoreWriter) -> None:
        part = TokenStore(writer.folder).prefix()
        before = part.fingerprint
        writer.append(np.full(3, 4), {})
        writer.finish({})
        assert len(part) == 4
        assert TokenStore(writer.folder, segments=1).fingerprint == part.fingerprint == before
        assert TokenStore(writer.folder).fingerprint != before

    def test_waiting_ends_when_the_writer_publishes(self, writer: StoreWriter) -> None:
        store = TokenStore(writer.folder)
        with pytest.raises(WaitTimeoutError, match="still being written"):
            store.wait(documents=5, timeout_s=0.1)
        writer.append(np.full(3, 4), {})
        writer.finish({})
        assert store[4].tolist() == [4, 4, 4]
        assert len(store) == 5

    def test_waiting_for_a_writer_that_is_gone_is_an_error(self, writer: StoreWriter) -> None:
        writer.close()
        with pytest.raises(UnknownLengthError, match=r"no process is writing it(.|\n)*build"):
            TokenStore(writer.folder).wait()


def test_a_store_goes_to_worker_processes_by_its_path(tmp_path: Path) -> None:
    store = write(tmp_path / "s", [[1, 2], [3]])
    assert len(pickle.dumps(store)) < 300
    assert pickle.loads(pickle.dumps(store))[1].tolist() == [3]
    loader = torch.utils.data.DataLoader(TensorSource(store), batch_size=None, num_workers=2)
    assert [each.tolist() for each in loader] == [[1, 2], [3]]


def test_what_is_no_store_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a token store"):
        TokenStore(tmp_path)


class TestKeys:
    def test_the_same_content_has_the_same_fingerprint_wherever_it_lies(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        texts = [f"text {number}" for number in range(50)]
        one = build(jsonl(tmp_path / "a" / "x.jsonl", texts), place=tmp_path / "one")
        other = build(jsonl(tmp_path / "b" / "y.jsonl", texts), place=tmp_path / "two")
        assert one.fingerprint == other.fingerprint
        assert one.folder.name != other.folder.name

    def test_a_finished_store_is_not_converted_again(self, tmp_path: Path) -> None:
        file = jsonl(tmp_path / "x.jsonl", ["abc"])
        calls = []

        def tokenizer(text: str) -> list[int]:
            calls.append(text)
            return [1]

        first = build(file, place=tmp_path, tokenizer=tokenizer)
        second = build(file, place=tmp_path, tokenizer=tokenizer)
        assert calls == ["abc"]
        assert first.folder == second.folder

    def test_another_tokenizer_option_or_dataset_is_another_store(self, tmp_path: Path) -> None:
        file = jsonl(tmp_path / "x.jsonl", ["abc"])
        folders = {
            build(file, place=tmp_path).folder,
            build(file, place=tmp_path, eod=256).folder,
            build(file, place=tmp_path, tokenizer=lambda text: [len(text)]).folder,
            build(jsonl(tmp_path / "x.jsonl", ["abd"]), place=tmp_path).folder,
        }
        assert len(folders) == 4

    def test_a_dataset_that_changed_under_the_run_is_found(self, tmp_path: Path) -> None:
        file = jsonl(tmp_path / "x.jsonl", ["abc"])
        store = build(file, place=tmp_path)
        store.check_source()
        jsonl(file, ["abc", "def"])
        with pytest.raises(DatasetChangedError, match=r"x\.jsonl has 32 bytes, and had 16 before"):
            store.check_source()
        file.unlink()
        with pytest.raises(DatasetChangedError, match="gone"):
            store.check_source()

    def test_a_dataset_that_goes_while_it_is_converted_is_told(self, tmp_path: Path) -> None:
        files = [jsonl(tmp_path / f"{name}.jsonl", ["abc"] * 1000) for name in "ab"]

        def tokenizer(text: str) -> list[int]:
            files[1].unlink(missing_ok=True)
            return [1]

        with pytest.raises(DatasetChangedError, match=r"b\.jsonl is gone"):
            build(files, place=tmp_path, tokenizer=tokenizer)

    def test_a_dataset_that_changes_while_it_is_converted_is_not_published(self, tmp_path: Path) -> None:
        file = jsonl(tmp_path / "x.jsonl", ["abc"] * 1000)

        def tokenizer(text: str) -> list[int]:
            file.write_text(file.read_text() + "{}\n")
            return [1]

        with pytest.raises(DatasetChangedError, match="while it was converted"):
            build(file, place=tmp_path, tokenizer=tokenizer, segment_bytes=100)
        assert not list(tmp_path.glob("*/seg-*"))
