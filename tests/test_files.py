"""Files that strangers may have put there, and files that only their owner reads."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from hyperpod_ext.cli import hp_ext

from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.files import make_private_folder, open_private, open_regular, read_regular, write_atomically
from hyperpod_ext.jobs.contract.run_files import Tail, read_event
from hyperpod_ext.runtime.events import reading
from hyperpod_ext.runtime.events.kept import read_kept
from hyperpod_ext.runtime.events.reading import complete_lines, parse_line
from hyperpod_ext.runtime.storage.file import FileStore
from hyperpod_ext.runtime.storage.open import open_tier


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_its_owner_reads_what_is_written_here(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "b")
    write_atomically(tmp_path / "a" / "text", "x")
    with open_private(tmp_path / "a" / "bytes", "ab", buffering=0) as file:
        file.write(b"x")
    assert [mode(tmp_path / "a" / name) for name in (".", "b", "text", "bytes")] == [0o700, 0o700, 0o600, 0o600]
    tmp_path.chmod(0o755)
    make_private_folder(tmp_path)
    assert mode(tmp_path) == 0o755


def test_a_link_under_the_name_of_a_file_that_is_being_written_is_not_followed(tmp_path: Path) -> None:
    (other := tmp_path / "other").write_text("whole")
    (tmp_path / f"file.{os.getpid()}").symlink_to(other)
    write_atomically(tmp_path / "file", "new")
    assert (other.read_text(), (tmp_path / "file").read_text()) == ("whole", "new")


def test_a_pipe_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "events.jsonl")
    for read in (open_regular, read_regular, lambda path: Tail(path).lines(), reading.read_events):
        with pytest.raises(OSError, match="not a regular file"):
            read(pipe)
    done = CliRunner().invoke(hp_ext, ["report", str(pipe)])
    assert (done.exit_code, "not a regular file" in done.output) == (1, True)


def test_a_file_is_measured_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(OSError, match="more than 67108864 bytes"):
        read_regular(tmp_path / "huge")


def test_a_line_that_is_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_LONGEST_LINE", 5)
    assert [*complete_lines(io.BytesIO(b"ab\nabcdefghijklm\nabcd\nabcde\nxy"))] == [
        b"ab\n",
        b"abcde",
        b"abcd\n",
        b"abcde",
        b"xy",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"t": NaN, "event": "go"}',
        '{"t": 1e999, "event": "go"}',
        f'{{"t": {10**400}, "event": "go"}}',
        "[1]",
    ],
    ids=["deep", "no number", "infinite", "huge", "list"],
)
def test_what_is_no_event_is_a_damaged_line(line: str) -> None:
    assert parse_line(line) is None
    assert read_event(line) == {} or "event" in read_event(line)


def test_a_kept_part_that_is_too_large_is_left_out_with_a_note(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_new("events/1-00000-000001.jsonl", b'{"t": 1.0, "event": "go", "step": 3}\n')
    store.put_new("events/notes.jsonl", b"not ours\n")
    with (tmp_path / "events" / "1-00001-000001.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    log = read_kept(store)
    assert [event.event for event in log.events] == ["go"]
    assert [note.rpartition("/")[2] for note in log.notes] == [
        "1-00001-000001.jsonl: it is not a part of an event log; it was left out"
    ]


def test_a_job_whose_kept_events_are_all_damaged_is_not_listed(tmp_path: Path) -> None:
    FileStore(tmp_path / "job").put_new("events/1-00000-000001.jsonl", b'{"t": -1e300, "event": "go", "step": 3}\n')
    done = CliRunner().invoke(hp_ext, ["list", "--kept", str(tmp_path)])
    assert done.exit_code == 6, done.output


@pytest.mark.parametrize("shared", [False, True])
def test_a_tier_says_whether_other_users_may_read(tmp_path: Path, shared: bool) -> None:
    tier = FileTier(path=str(tmp_path), shared=shared)
    assert ("shared" in tier.model_dump()) is shared, "images with an earlier version know no such field"
    before = os.umask(0o022)
    try:
        open_tier(tier, "job").put_new("x", b"x")
    finally:
        os.umask(before)
    assert mode(tmp_path / "job" / "x") == (0o644 if shared else 0o600)
