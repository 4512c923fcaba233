"""Where local jobs are kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from local_place import LocalPlace

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.jobs.contract.home import home
from hyperpod_ext.jobs.local import store as local_store
from hyperpod_ext.jobs.local.result import NodeEnd
from hyperpod_ext.jobs.local.watch import read_job_status


def test_the_home_is_the_given_one_or_the_users_state_folder() -> None:
    assert home({"HPX_HOME": "/a"}) == Path("/a/local")
    assert home({"XDG_STATE_HOME": "/s", "HOME": "/h"}) == Path("/s/hyperpod_ext/local")
    assert home({"HOME": "/h"}) == Path("/h/.local/state/hyperpod_ext/local")


def test_a_job_that_is_started_again_is_as_far_as_it_has_come(place: LocalPlace) -> None:
    """One that had made all its steps makes none."""
    with local_store.locked("a"):
        submission = local_store.create("a")
    submission.run_dir("main").mkdir()
    event = '{"t": 1.0, "event": "begun", "rank": 0, "step": 25, "of": 25}\n'
    (submission.run_dir("main") / "events.jsonl").write_text(event)
    status = read_job_status(submission, running=True)
    assert (status.step, status.of) == (25, 25)


def test_a_full_disk_is_named_with_the_file_that_cannot_be_written(
    place: LocalPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_store.locked("a"):
        submission = local_store.create("a")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local_store, "write_atomically", full)
    with pytest.raises(HyperpodExtError, match=r"result\.json cannot be written: No space left on device"):
        submission.end({"state": "failed", "error": None})


def test_the_last_ten_submissions_are_kept(place: LocalPlace) -> None:
    with local_store.locked("a"):
        for _ in range(12):
            going = local_store.removed_by_next("a")
            newest = local_store.create("a")
    assert [old.name for old in going] == ["0002"]
    kept = sorted(entry.name for entry in newest.folder.parent.iterdir() if entry.is_dir())
    assert kept == [f"{number:04d}" for number in range(3, 13)]
    assert local_store.latest("a") == newest


def test_a_name_is_held_by_one_and_free_again_afterwards(place: LocalPlace) -> None:
    with local_store.locked("a") as first, local_store.locked("a") as second:
        assert first is not None
        assert second is None
    with local_store.locked("a") as third:
        assert third is not None


def test_a_lock_lives_as_long_as_its_last_copy(place: LocalPlace) -> None:
    with local_store.locked("a") as lock:
        assert lock is not None
        submission = local_store.create("a")
        copy = os.dup(lock)
    assert submission.is_running()
    os.close(copy)
    assert not submission.is_running()


def test_a_submission_is_listed_only_with_its_status(place: LocalPlace) -> None:
    assert local_store.names() == []
    (place.home / "local" / "half" / "draft").mkdir(parents=True)
    with local_store.locked("whole"):
        local_store.create("whole")
    assert local_store.names() == ["whole"]
    newest = local_store.latest("whole")
    assert newest is not None
    assert newest.read_status()["state"] == "starting"


def test_a_status_is_replaced_whole(place: LocalPlace) -> None:
    with local_store.locked("a"):
        submission = local_store.create("a")
    submission.write_status(state="running")
    submission.write_status(scratch="/tmp/x")
    assert submission.read_status()["state"] == "running"
    assert {entry.name for entry in submission.folder.iterdir()} == {"status.json", "reserved"}
    submission.end({"state": "failed", "error": None})
    assert {entry.name for entry in submission.folder.iterdir()} == {"status.json", "result.json"}


def test_an_end_of_a_node_that_a_full_disk_cut_off_is_left_out(place: LocalPlace) -> None:
    with local_store.locked("a"):
        submission = local_store.create("a")
    submission.node_ended(NodeEnd(0, -9))
    with (submission.folder / "nodes_ended.jsonl").open("a") as file:
        file.write('{"node": 1, "co')
    submission.node_ended(NodeEnd(1, 7))
    submission.node_ended(NodeEnd(2, 7))
    assert submission.node_ends() == [NodeEnd(0, -9), NodeEnd(2, 7)]
