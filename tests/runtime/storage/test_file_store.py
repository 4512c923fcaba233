"""What only a directory can get wrong: full disks, crashes between the steps of a write, links."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from awscrt import checksums
from small_disk import mounted

from hyperpod_ext.errors import ConfigError, CorruptSnapshotError, HyperpodExtError, NotFoundError, UnreachableError
from hyperpod_ext.runtime.storage.file import FileStore
from hyperpod_ext.runtime.storage.object_store import MIB


def put(store: FileStore, name: str, data: bytes) -> None:
    store.put(name, memoryview(data), f"{checksums.crc64nvme(data):016x}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "4m") as disk:
        yield disk


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(small_disk: Path) -> None:
    store = FileStore(small_disk)
    put(store, "step-1/x", b"1" * MIB)
    with pytest.raises(UnreachableError, match="step-2/x: No space left on device") as caught:
        put(store, "step-2/x", b"2" * 5 * MIB)
    assert "Free space" in caught.value.hint
    with pytest.raises(UnreachableError):
        store.put_new("step-3", b"3" * 5 * MIB)
    assert [path for path in small_disk.rglob("*") if path.is_file()] == [small_disk / "step-1/x"]
    put(store, "step-2/x", b"2" * MIB)


def test_many_races_have_one_winner_each(tmp_path: Path) -> None:
    store, together = FileStore(tmp_path), threading.Barrier(8)

    def race(number: int) -> bool:
        together.wait()
        return store.put_new(f"manifest-{number // 8}", b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        won = [number for number, mine in enumerate(pool.map(race, range(400))) if mine]
    assert [number // 8 for number in won] == [*range(50)]
    assert all(store.get(f"manifest-{number // 8}") == b"%d" % number for number in won)


def test_a_writer_killed_at_any_moment_leaves_the_old_blob_or_the_new(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    program = (
        "import sys\n"
        "from awscrt import checksums\n"
        "from hyperpod_ext.runtime.storage.file import FileStore\n"
        "store = FileStore(sys.argv[1])\n"
        "blobs = [bytes([n]) * (6 * 1024 * 1024 + n) for n in range(2)]\n"
        "sums = [f'{checksums.crc64nvme(blob):016x}' for blob in blobs]\n"
        "for round in range(10_000):\n"
        "    store.put('blob', memoryview(blobs[round % 2]), sums[round % 2])\n"
        "    print(round, flush=True)\n"
    )
    for pause_s in (0.0, 0.003, 0.007, 0.012):
        writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout
        with writer.stdout:
            writer.stdout.readline()
            time.sleep(pause_s)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        entries = store.list()
        assert [entry.name for entry in entries] == ["blob"]
        data = store.get("blob")
        assert len(set(data)) == 1
        assert len(data) == 6 * MIB + data[0]


@pytest.mark.parametrize("way", ["put", "put_new"])
def test_bytes_are_on_the_disk_before_their_name_and_the_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    done: list[str] = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def syncing(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append("folder" if synced.is_dir() else f"{synced.stat().st_size} bytes")
        fsync(descriptor)

    def named(rename: Callable[..., object]) -> Callable[..., None]:
        def name(*names: str, **folders: int) -> None:
            rename(*names, **folders)
            done.append("name")

        return name

    store = FileStore(tmp_path)
    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", named(replace))
    monkeypatch.setattr(os, "link", named(link))
    if way == "put":
        put(store, "blob", b"12345")
    else:
        assert store.put_new("blob", b"12345")
    assert done == ["5 bytes", "name", "folder"]


def test_a_folder_that_is_made_is_on_the_disk_before_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def syncing(descriptor: int) -> None:
        if (path := Path(f"/proc/self/fd/{descriptor}").readlink()).is_dir():
            synced.append(str(path.relative_to(tmp_path)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", syncing)
    put(FileStore(tmp_path), "step-1/x", b"1")
    assert synced == [".", "step-1"]


def test_what_a_killed_writer_left_is_no_blob_and_goes_with_its_blob(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    put(store, "step-1/x", b"1")
    (tmp_path / "step-1/.x.0123456789abcdef.partial").write_bytes(b"half")
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2/.x.0123456789abcdef.partial").write_bytes(b"half")
    assert [entry.name for entry in store.list()] == ["step-1/x"]
    assert [*store.folders()] == ["step-1"]
    store.delete(["step-1/x"])
    assert not (tmp_path / "step-1").exists()


def test_a_check_removes_what_nobody_can_still_be_writing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    (old := tmp_path / ".x.0123456789abcdef.partial").write_bytes(b"half")
    (new := tmp_path / ".y.0123456789abcdef.partial").write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    store.check()
    assert not old.exists()
    assert new.exists()


def test_a_check_goes_on_where_another_node_removes_a_folder_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone := tmp_path / "a-step-1").mkdir()
    (tmp_path / "step-2").mkdir()
    (old := tmp_path / "step-2" / ".x.0123456789abcdef.partial").write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    look = os.open

    def removed_meanwhile(name: Any, *flags: int, **folder: Any) -> int:
        if name == gone.name:
            gone.rmdir()
        return look(name, *flags, **folder)

    monkeypatch.setattr(os, "open", removed_meanwhile)
    FileStore(tmp_path).check()
    assert not gone.exists()
    assert not old.exists()


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(UnreachableError, match="file"):
        FileStore(tmp_path / "file").check()
    with pytest.raises(UnreachableError, match="proc"):
        FileStore("/proc/hpx").check()


def test_the_stores_load_neither_torch_nor_boto3() -> None:
    program = (
        "import sys, hyperpod_ext.runtime.storage.s3, hyperpod_ext.runtime.storage.file\n"
        "print(sorted({'torch', 'boto3', 'botocore'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- strangers who can write there ---------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_other_users_read_only_what_is_shared(tmp_path: Path, shared: bool) -> None:
    before = os.umask(0o027)
    try:
        store = FileStore(tmp_path / "new", "job", shared=shared)
        put(store, "step-1/x", b"1")
        store.put_new("y", b"2")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]}
    assert modes == ({0o750, 0o640} if shared else {0o700, 0o600})


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    for name in ("manifest.json", ".x.0123456789abcdef.partial", "deep/x"):
        (tmp_path / "outside" / name).write_text("years of work")
        os.utime(tmp_path / "outside" / name, (1e9, 1e9))
    return tmp_path / "outside"


def whole(outside: Path) -> bool:
    return {path.name for path in outside.rglob("*")} == {"manifest.json", ".x.0123456789abcdef.partial", "deep", "x"}


@pytest.mark.parametrize("how", ["link", "mount"])
def test_nothing_that_leads_out_of_a_store_is_listed_read_or_deleted(tmp_path: Path, outside: Path, how: str) -> None:
    store = FileStore(tmp_path / "tier", "job")
    put(store, "step-1/x", b"1")
    (inner := store.root / "step-2").mkdir()
    if how == "link":
        inner.rmdir()
        inner.symlink_to(outside)
    elif subprocess.run(["mount", "--bind", outside, inner], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        store.check()
        assert [entry.name for entry in store.list()] == ["step-1/x"]
        with suppress(UnreachableError):
            assert store.list("step-2/") == []
        assert [*store.folders()] == ["step-1"]
        for use in (
            lambda: store.get("step-2/manifest.json"),
            lambda: store.delete(["step-2/manifest.json", "step-2/deep/x"]),
            lambda: put(store, "step-2/new", b"1"),
        ):
            with suppress(HyperpodExtError):
                use()
        assert whole(outside)
    finally:
        if how == "mount":
            subprocess.run(["umount", inner], check=True)


def test_a_link_that_takes_the_place_of_a_folder_at_any_moment_leads_nowhere(tmp_path: Path, outside: Path) -> None:
    """Between the look and the use: a thread exchanges folder and link all the time."""
    store, stop = FileStore(tmp_path / "tier"), threading.Event()
    put(store, "deep/y", b"1")
    folder, aside, link = store.root / "deep", tmp_path / "aside", tmp_path / "link"
    link.symlink_to(outside / "deep")

    def exchange() -> None:
        while not stop.is_set():
            for one, other in ((folder, aside), (link, folder), (folder, link), (aside, folder)):
                with suppress(OSError):
                    one.rename(other)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(300):
            with suppress(HyperpodExtError):
                assert {entry.name for entry in store.list()} <= {"deep/y"}
            with suppress(HyperpodExtError):
                store.delete(["deep/x"])
            with suppress(HyperpodExtError):
                assert store.get("deep/x") == b""
    finally:
        stop.set()
        thread.join()
    assert whole(outside)


def test_the_jobs_own_folder_must_not_be_a_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "job").symlink_to(outside)
    store = FileStore(tmp_path / "tier", "job")
    for use in (store.check, store.list, lambda: put(store, "x", b"1"), lambda: store.delete(["manifest.json"])):
        with pytest.raises(UnreachableError, match="tier/job is a symbolic link or a file, not a folder"):
            use()
    assert whole(outside)


def test_what_is_no_file_is_never_waited_for_and_never_taken_for_a_blob(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zeros").symlink_to("/dev/zero")
    assert store.list() == []
    for name in ("pipe", "folder", "zeros"):
        with pytest.raises(NotFoundError, match=f"{name} is not a regular file"):
            store.get(name)
        with pytest.raises(NotFoundError):
            store.read_into(name, memoryview(bytearray(1)))
        with pytest.raises(UnreachableError, match="not a regular file"):
            store.put_new(name, b"x")


def test_a_blob_is_measured_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(CorruptSnapshotError, match="more than 1000 bytes"):
        FileStore(tmp_path).get("huge", 1000)


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "a\u202eb", "a\udcffb", "/".join("123456789")])
def test_names_with_control_characters_or_too_many_parts_do_not_exist(tmp_path: Path, name: str) -> None:
    store = FileStore(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("x")
    assert store.list() == []
    with pytest.raises(ConfigError):
        store.get(name)


# --- file systems that lack something ------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(*names: str, **folders: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(UnreachableError, match="does not make hard links"):
        FileStore(tmp_path).check()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_system_whose_links_replace_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(one: str, other: str, *, follow_symlinks: bool, **folders: int) -> None:
        os.replace(one, other, **folders)  # noqa: PTH105

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(UnreachableError, match="replaces a blob that exists, despite hard links"):
        FileStore(tmp_path).check()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("what", ["link", "file"])
def test_what_is_in_place_of_the_folder_that_is_needed_first_is_named(tmp_path: Path, outside: Path, what: str) -> None:
    (store := FileStore(tmp_path / "tier")).check()
    if what == "link":
        (tmp_path / "tier" / "generations").symlink_to(outside)
    else:
        (tmp_path / "tier" / "generations").write_text("x")
    with pytest.raises(UnreachableError, match=r"tier/generations/.*: Not a directory") as caught:
        store.check()
    assert "Remove the file or symbolic link" in caught.value.hint
    assert whole(outside)


def test_folders_are_found_without_a_look_at_all_that_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place above a job's may be a file system with everything of everybody."""
    store, looked = FileStore(tmp_path), list[object]()
    for number in range(20):
        put(store, f"a/{number}/x", b"1")
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: [looked.append(folder), scandir(folder)][1])
    assert [*store.folders()] == ["a"]
    assert len(looked) == 5
