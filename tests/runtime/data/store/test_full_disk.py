"""No room: an error that says so, what was written before stays, and no SIGBUS."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hyperpod_ext.errors import DiskFullError
from hyperpod_ext.runtime.data import ReadyRing, TokenStore, build
from hyperpod_ext.runtime.data.convert.check import check


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    file = tmp_path / "numbers.txt"
    file.write_text("".join(f"line {number:>90}\n" for number in range(40_000)))  # 4 MB
    return file


def test_a_full_tmpfs_is_an_error_and_conversion_goes_on_when_there_is_room(tmpfs: Path, dataset: Path) -> None:
    other = tmpfs / "other"
    with pytest.raises(
        DiskFullError, match=r"seg-000003\.tokens.* was not written: No space left on device(.|\n)*--budget"
    ):
        build(dataset, place=tmpfs, split="lines", segment_bytes=500_000)
    (folder,) = tmpfs.glob("numbers-*")
    assert [check(folder).problems, check(folder).segments] == [[], 3]
    assert not list(folder.glob(".*"))  # nothing unfinished takes room
    assert TokenStore(folder).prefix()[0].tobytes().startswith(b"line  ")
    assert not other.exists()
    subprocess.run(["mount", "-o", "remount,size=16m", tmpfs], check=True)
    assert len(build(dataset, place=tmpfs, split="lines", segment_bytes=500_000)) == 40_000


def test_a_full_tmpfs_does_not_end_a_run_that_has_a_ring(tmpfs: Path) -> None:
    ring = ReadyRing(tmpfs, "stream", budget_bytes=1 << 30)
    for step in range(8):
        made = ring.fetch(step, 0, lambda: {"tokens": np.full(500_000, 1, np.uint8)})
        assert made["tokens"].sum() == 500_000
    assert ring.stats.not_kept > 0
    assert ring.stats.made == 8
    assert len(ring.ready()) == 8 - ring.stats.not_kept


def test_a_limit_on_file_sizes_is_an_error_too(tmp_path: Path, dataset: Path) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
            build(dataset, place=tmp_path, split="lines", segment_bytes=500_000)
        except DiskFullError as error:
            code = 42 if "File too large" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42


def test_the_command_says_it_without_a_traceback(tmpfs: Path, dataset: Path) -> None:
    hp_ext = str(Path(sys.executable).with_name("hp-ext"))
    command = [hp_ext, "data", "build", dataset, "--split", "lines", "--segment", "500000", "--out", tmpfs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "")
    assert "was not written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
