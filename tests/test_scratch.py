"""Folders whose owner was killed go with the next start; nobody else's do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hyperpod_ext.processes import is_alive
from hyperpod_ext.scratch import make_scratch, remove_abandoned, scratch_folder

OWNER = """
import subprocess, sys
from pathlib import Path
from hyperpod_ext.processes import is_alive
from hyperpod_ext.scratch import make_scratch
made = make_scratch(within=Path(sys.argv[1]))
environ = {"HPX_AGENT_SOCKET": f"{made.path}/node0.agent"}
left = subprocess.Popen(["sleep", "600"], env=environ, start_new_session=True, stdout=subprocess.DEVNULL)
while b"HPX_AGENT_SOCKET" not in Path(f"/proc/{left.pid}/environ").read_bytes():
    pass  # for a moment it has neither the former program's variables nor its own
print(made.path, left.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(within: Path) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    """A process with a folder, and one that it started for that."""
    command = [sys.executable, "-c", OWNER, str(within)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder, left = process.stdout.readline().split()
        try:
            yield process, Path(folder), int(left)
        finally:
            process.kill()


def test_a_folder_whose_owner_was_killed_goes_with_the_next_start_and_what_ran_for_it(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, folder, left):
        (folder / "node0.agent").touch()
        process.kill()
        process.wait()
        assert folder.exists()
        with scratch_folder(within=tmp_path) as mine:
            assert [path for path in tmp_path.iterdir() if path != mine] == []
            assert not is_alive(left)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_owner_lives_stays_and_so_does_one_without_an_owner(tmp_path: Path) -> None:
    (tmp_path / "hpx-mine").mkdir()
    (tmp_path / "hpx-file").touch()
    with owner(tmp_path) as (_, folder, left):
        assert remove_abandoned(within=tmp_path) == []
        assert folder.exists()
        assert is_alive(left)
        assert (tmp_path / "hpx-mine").exists()


def test_a_long_temporary_directory_gives_way_to_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    made = make_scratch("hpx-test-short-")
    assert made.path.parent == Path("/tmp")
    assert list(long.iterdir()) == []
    made.remove()
