"""Megatron's files, written here byte for byte as its preprocess_data.py does, and mapped in place."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from changed_files import WAYS, change

from hyperpod_ext.errors import ConfigError, DatasetChangedError, NotFoundError
from hyperpod_ext.runtime.data import MegatronStore, Packed, TensorSource

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}
LENGTHS = [5, 1, 0, 700, 12]


def write(prefix: Path, dtype: str = "uint16", modes: bool = False) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 200, length).astype(dtype) for length in LENGTHS]
    lengths = np.array(LENGTHS, "<i4")
    pointers = (np.cumsum(LENGTHS) - LENGTHS) * np.dtype(dtype).itemsize
    documents = np.arange(len(LENGTHS) + 1, dtype="<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(LENGTHS), len(documents))
    parts = [head, lengths.tobytes(), pointers.astype("<i8").tobytes(), documents.tobytes()]
    parts += [bytes(len(LENGTHS))] if modes else []
    Path(f"{prefix}.idx").write_bytes(b"".join(parts))
    Path(f"{prefix}.bin").write_bytes(b"".join(each.tobytes() for each in sequences))
    return sequences


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("modes", [False, True])
def test_sequences_are_those_that_were_written(tmp_path: Path, dtype: str, modes: bool) -> None:
    wanted = write(tmp_path / "x", dtype, modes)
    store = MegatronStore(tmp_path / "x.bin")
    assert [store[number].tolist() for number in range(len(store))] == [each.tolist() for each in wanted]
    assert store[3].dtype == np.dtype(dtype)
    assert not store[3].flags.owndata
    assert not store[3].flags.writeable
    row = np.concatenate(wanted).tolist()
    packed = Packed(store, 64)
    assert packed.batch([1, 3]).tolist() == [row[64:129], row[192:257]]
    assert packed.boundaries(0).tolist() == [0, 5, 6]
    assert TensorSource(store)[0].tolist() == wanted[0].tolist()
    assert pickle.loads(pickle.dumps(store)).fingerprint == store.fingerprint


@pytest.mark.parametrize("how", WAYS)
def test_a_dataset_that_changes_under_the_run_is_an_error_and_never_a_signal(tmp_path: Path, how: str) -> None:
    write(tmp_path / "x")
    store = MegatronStore(tmp_path / "x")
    first, file = store[0].tolist(), tmp_path / "x.bin"
    change(file, how)
    if how in ("replaced", "gone"):
        assert store[0].tolist() == first  # what is mapped stays
    with pytest.raises(DatasetChangedError, match=r"x\.bin: the dataset was changed during the run"):
        store.check_source()
    if how in ("cut", "written"):
        with pytest.raises(DatasetChangedError):
            store[0]


def test_fingerprints_tell_datasets_apart(tmp_path: Path) -> None:
    for name, dtype in [("a", "uint16"), ("b", "uint16"), ("c", "int32"), ("d", "uint16")]:
        write(tmp_path / name, dtype)
    (tmp_path / "d.bin").write_bytes(bytes(len((tmp_path / "d.bin").read_bytes())))
    a, b, c, d = (MegatronStore(tmp_path / name).fingerprint for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "x")
    idx, data = tmp_path / "x.idx", (tmp_path / "x.idx").read_bytes()
    for bad, message in [
        (data[:-3], r"x\.idx: it has .* its header lists"),
        (b"MMIDIDY" + data[7:], "does not begin"),
        (data[:17] + b"\x07" + data[18:], "type 7"),
        (data[:34] + b"\xff" * 4 + data[38:], "negative"),
    ]:
        idx.write_bytes(bad)
        with pytest.raises(ConfigError, match=message):
            MegatronStore(tmp_path / "x")
    idx.write_bytes(data)
    os.truncate(tmp_path / "x.bin", 100)
    with pytest.raises(ConfigError, match=r"x\.bin: it has 100 bytes, but the index needs 1,436"):
        MegatronStore(tmp_path / "x")
    (tmp_path / "x.bin").unlink()
    with pytest.raises(NotFoundError, match=r"no .*x\.bin"):
        MegatronStore(tmp_path / "x")


def test_sequences_that_do_not_follow_one_another_can_only_be_read_one_by_one(tmp_path: Path) -> None:
    wanted = write(tmp_path / "x")
    data = bytearray((tmp_path / "x.idx").read_bytes())
    at = 34 + 4 * len(LENGTHS)
    data[at : at + 8], data[at + 8 : at + 16] = struct.pack("<q", 2), struct.pack("<q", 0)
    (tmp_path / "x.idx").write_bytes(data)
    store = MegatronStore(tmp_path / "x")
    assert store[3].tolist() == wanted[3].tolist()
    with pytest.raises(ConfigError, match="one by one"):
        Packed(store, 8)[0]
