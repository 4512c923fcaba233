"""One copy a node: what four readers have mapped, by the kernel's own account."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hyperpod_ext.runtime.data import TokenStore
from hyperpod_ext.runtime.data.token_store.writer import StoreWriter

READERS = 4
SEGMENTS = 4
SEGMENT = 8 << 20


def pss_of_segments(pid: int) -> int:
    """Bytes of a process' share in mappings of segments."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split()[0]:
            ours = line.endswith(".tokens")
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "s", {"source": []}, segment_bytes=SEGMENT) as writer:
        for number in range(SEGMENTS * 64):
            writer.append(np.full(SEGMENT // 64, number % 256), {})
        writer.finish({})
    return tmp_path / "s"


def test_four_readers_have_one_copy_between_them(folder: Path) -> None:
    ready, go = os.pipe(), os.pipe()
    pids = []
    for _ in range(READERS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                store = TokenStore(folder)
                total = sum(int(document.sum()) for document in store)  # every page, and every checksum
                assert total == sum(number % 256 for number in range(SEGMENTS * 64)) * (SEGMENT // 64)
                os.write(ready[1], b"1")
                os.read(go[0], 1)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    for _ in pids:
        assert os.read(ready[0], 1) == b"1"
    shares = [pss_of_segments(pid) for pid in pids]
    os.write(go[1], b"1" * READERS)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * READERS
    data = sum(path.stat().st_size for path in folder.glob("seg-*"))
    print(f"{sum(shares) / data:.3f} times the data, in {READERS} readers")
    assert min(shares) > 0.2 * data / READERS  # each of them has it mapped
    assert sum(shares) <= 1.1 * data
    for end in (*ready, *go):
        os.close(end)
