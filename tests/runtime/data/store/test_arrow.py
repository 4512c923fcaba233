"""Arrow files with rows of tokens, mapped in place where they can be, and refused with the reason where not."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changed_files import WAYS, change

from hyperpod_ext.errors import ConfigError, DatasetChangedError, NotFoundError
from hyperpod_ext.runtime.data import ArrowStore, Packed, TensorSource, build
from hyperpod_ext.runtime.data.token_store.arrow import columns_of

pa = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")

ROWS = [[5, 6, 7], [], [200], list(range(40)), [9] * 12]


def table(rows: Any = ROWS, kind: Any = None) -> Any:
    kind = kind or pa.list_(pa.int32())
    return pa.table({"ids": pa.array(rows, kind), "text": [str(row) for row in rows], "label": [*range(len(rows))]})


def write(path: Path, data: Any, how: str = "file", batch_rows: int = 2, compression: str | None = None) -> Path:
    if how == "feather":
        feather.write_feather(data, path, compression=compression or "uncompressed", chunksize=batch_rows)
        return path
    open_writer = pa.ipc.new_stream if how == "stream" else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, open_writer(file, data.schema, options=options) as writer:
        writer.write_table(data, max_chunksize=batch_rows)
    return path


@pytest.mark.parametrize("how", ["file", "stream", "feather"])
@pytest.mark.parametrize("batch_rows", [1, 2, 100])
@pytest.mark.parametrize("kind", ["list<int32>", "large_list<uint16>", "list<int64>"])
def test_rows_are_those_that_were_written_and_share_the_mapping(
    tmp_path: Path, how: str, batch_rows: int, kind: str
) -> None:
    number = getattr(pa, kind.partition("<")[2].rstrip(">"))()
    list_of = pa.large_list if kind.startswith("large") else pa.list_
    path = write(tmp_path / "a.arrow", table(kind=list_of(number)), how, batch_rows)
    store = ArrowStore(path)
    assert [row.tolist() for row in store] == ROWS
    assert [store[number - len(ROWS)].tolist() for number in range(len(ROWS))] == ROWS
    assert store.dtype == np.dtype(str(number))
    mapped = np.frombuffer(store._files[0].map, np.uint8)
    assert all(np.shares_memory(row, mapped) for row in store if len(row))
    assert not store[3].flags.writeable
    flat = [token for row in ROWS for token in row]
    assert store.tokens == len(flat)
    packed = Packed(store, 9)
    assert packed.batch([0, 3, 1]).tolist() == [flat[at * 9 : at * 9 + 10] for at in (0, 3, 1)]
    assert packed.boundaries(0).tolist() == [0, 3, 4]
    assert TensorSource(store)[3].tolist() == ROWS[3]
    again = pickle.loads(pickle.dumps(store))
    assert again.fingerprint == store.fingerprint
    with pytest.raises(IndexError, match="document 5 of 5"):
        store[5]


def test_files_follow_one_another_and_what_was_cut_from_a_larger_table_is_whole(tmp_path: Path) -> None:
    part = table([[1] * 30, *ROWS]).slice(1)  # its offsets do not begin at 0 in memory
    for name in ("data-00000.arrow", "data-00001.arrow"):
        write(tmp_path / name, part, "stream")
    store = ArrowStore(tmp_path, "ids")
    assert [row.tolist() for row in store] == ROWS * 2
    assert Packed(store, 100).batch([0]).tolist() == [[token for row in ROWS * 2 for token in row][:101]]


def test_a_tensor_that_is_written_to_leaves_the_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", table())
    before = path.read_bytes()
    store = ArrowStore(path)
    TensorSource(store)[0][:] = 1
    assert store[0].tolist() == [1, 1, 1]
    assert path.read_bytes() == before
    assert ArrowStore(path)[0].tolist() == ROWS[0]


REFUSED = {
    "compressed": (lambda path: write(path, table(), compression="zstd"), "it is compressed"),
    "null row": (lambda path: write(path, table([[1], None])), "rows that are null"),
    "null token": (lambda path: write(path, table([[1, None]])), "tokens that are null"),
    "floats": (lambda path: write(path, table(kind=pa.list_(pa.float32()))), "list<.*float>, not a list of whole"),
    "text": (lambda path: write(path, table().select(["text"])), "text: it is string, not a list of whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mapped_is_told_with_the_reason_and_can_be_converted(tmp_path: Path, name: str) -> None:
    make, why = REFUSED[name]
    path = make(tmp_path / "a.arrow")
    with pytest.raises(ConfigError, match=rf"a\.arrow: .*{why}") as refused:
        ArrowStore(path, None if name == "text" else "ids")
    assert "hp-ext data build" in str(refused.value)
    if name == "compressed":
        store = build(path, place=tmp_path / "stores", field="ids", tokenizer="none")
        assert [document.tolist() for document in store] == ROWS


def test_columns_are_named_with_how_each_is_read(tmp_path: Path) -> None:
    found = {column.name: column for column in columns_of(write(tmp_path / "a.arrow", table()))}
    assert found["ids"].converted == ""
    assert "not a list" in found["text"].converted
    assert "int64" in found["label"].converted
    both = pa.table({"ids": ROWS, "mask": ROWS})
    with pytest.raises(ConfigError, match=r"several columns can be mapped.*\n?.*ids, mask"):
        ArrowStore(write(tmp_path / "b.arrow", both))
    with pytest.raises(ConfigError, match=r"there is no column id[\s\S]*ids"):
        ArrowStore(tmp_path / "b.arrow", "id")


@pytest.mark.parametrize("how", WAYS)
def test_a_file_that_changes_under_the_run_is_an_error_and_never_a_signal(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "a.arrow", table())
    store = ArrowStore(path)
    change(path, how)
    with pytest.raises(DatasetChangedError, match=r"a\.arrow: the dataset was changed during the run"):
        store.check_source()
    if how in ("cut", "written"):
        for read in (lambda: store[0], lambda: Packed(store, 9).batch([0, 1])):
            with pytest.raises(DatasetChangedError):
                read()
    else:
        assert store[0].tolist() == ROWS[0]


def test_damaged_and_wrong_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", table(), batch_rows=100)
    data = path.read_bytes()
    offsets = np.cumsum([0, *map(len, ROWS)]).astype("<i4").tobytes()
    at = data.index(offsets)
    for bad, message in [
        (data[: at + 8] + (1 << 30).to_bytes(4, "little") + data[at + 12 :], "list offsets are not in order"),
        (data[:100], "cannot be read"),
        (b"", "it is empty"),
    ]:
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match=rf"a\.arrow: .*{message}"):
            ArrowStore(path, "ids")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"x\.parquet: .*not an Arrow file"):
        ArrowStore(tmp_path / "x.parquet")
    with pytest.raises(NotFoundError):
        ArrowStore(tmp_path / "nothing.arrow")
    with pytest.raises(ConfigError, match="no row"):
        ArrowStore(write(tmp_path / "b.arrow", table([])), "ids")


def test_fingerprints_tell_files_and_columns_apart(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a.arrow", table()), write(tmp_path / "b.arrow", table())
    other = write(tmp_path / "c.arrow", table([[5, 6, 8], *ROWS[1:]]))
    both = write(tmp_path / "d.arrow", pa.table({"ids": ROWS, "mask": ROWS}))
    assert ArrowStore(one).fingerprint == ArrowStore(two).fingerprint
    assert len({ArrowStore(one).fingerprint, ArrowStore(other).fingerprint, ArrowStore([one, two]).fingerprint}) == 3
    assert ArrowStore(both, "ids").fingerprint != ArrowStore(both, "mask").fingerprint
