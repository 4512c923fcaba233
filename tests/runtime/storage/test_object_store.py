"""What every object store promises, held against a directory and against a real S3."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import s3_server
from awscrt import checksums

from hyperpod_ext.errors import ConfigError, CorruptSnapshotError, NotFoundError, UnreachableError
from hyperpod_ext.runtime.storage.file import FileStore
from hyperpod_ext.runtime.storage.object_store import MIB, Cancelled, Entry, ObjectStore, Until
from hyperpod_ext.runtime.storage.open import open_store
from hyperpod_ext.runtime.storage.s3 import S3Store

LARGE = 12 * MIB + 345
"""Three parts of 5 MiB, the least that S3 takes."""


def crc(data: bytes) -> str:
    return f"{checksums.crc64nvme(data):016x}"


def put(store: ObjectStore, name: str, data: bytes) -> None:
    store.put(name, memoryview(data), crc(data))


def read(store: ObjectStore, name: str, nbytes: int, offset: int = 0) -> bytes:
    into = bytearray(nbytes)
    store.read_into(name, memoryview(into), offset)
    return bytes(into)


class StoreContract:
    @pytest.fixture
    def store(self) -> ObjectStore:
        raise NotImplementedError

    def test_it_is_checked_before_use_and_left_empty(self, store: ObjectStore) -> None:
        store.check()
        assert store.list() == []
        assert store.folders() == []

    @pytest.mark.parametrize("nbytes", [0, 1, 5 * MIB, 5 * MIB + 1, LARGE])
    def test_a_blob_comes_back_bit_for_bit(self, store: ObjectStore, nbytes: int) -> None:
        data = os.urandom(nbytes)
        counted: list[int] = []
        store.put("step-7/rank-0.distcp", memoryview(data), crc(data), on_bytes=counted.append)
        assert sum(counted) == nbytes
        into, counted = bytearray(nbytes), []
        store.read_into("step-7/rank-0.distcp", memoryview(into), on_bytes=counted.append)
        assert bytes(into) == data
        assert sum(counted) == nbytes
        assert store.get("step-7/rank-0.distcp") == data
        assert store.list() == [Entry("step-7/rank-0.distcp", nbytes)]

    def test_any_range_can_be_read(self, store: ObjectStore) -> None:
        data = os.urandom(LARGE)
        put(store, "blob", data)
        for offset, nbytes in [(0, 1), (LARGE - 1, 1), (5 * MIB - 3, 6), (3, 10 * MIB), (LARGE, 0)]:
            assert read(store, "blob", nbytes, offset) == data[offset : offset + nbytes]

    def test_memory_of_other_item_sizes_is_taken_as_bytes(self, store: ObjectStore) -> None:
        data = os.urandom(800)
        store.put("blob", memoryview(data).cast("q"), crc(data))
        into = memoryview(bytearray(800)).cast("d")
        store.read_into("blob", into)
        assert into.cast("B") == data

    def test_a_put_replaces(self, store: ObjectStore) -> None:
        put(store, "blob", b"old and longer")
        put(store, "blob", b"new")
        assert store.get("blob") == b"new"

    @pytest.mark.parametrize("nbytes", [100, LARGE])
    def test_bytes_that_do_not_match_their_checksum_never_become_visible(self, store: ObjectStore, nbytes: int) -> None:
        data = os.urandom(nbytes)
        with pytest.raises(CorruptSnapshotError, match="CRC64-NVME"):
            store.put("blob", memoryview(data), crc(data + b"x"))
        with pytest.raises(CorruptSnapshotError):
            store.put("other", memoryview(data), "0123456789abcdef")
        assert store.list() == []
        self.nothing_unfinished(store)

    def test_a_refused_put_keeps_the_old_blob(self, store: ObjectStore) -> None:
        put(store, "blob", b"good")
        data = os.urandom(LARGE)  # LocalStack, unlike S3, loses the old blob when it refuses a single PUT
        with pytest.raises(CorruptSnapshotError):
            store.put("blob", memoryview(data), crc(data + b"x"))
        assert store.get("blob") == b"good"

    def test_a_cancelled_put_leaves_nothing(self, store: ObjectStore) -> None:
        data = os.urandom(LARGE)
        put(store, "blob", b"old")
        looks = iter(range(1000))
        with pytest.raises(Cancelled):
            store.put("blob", memoryview(data), crc(data), cancelled=lambda: next(looks) >= 2)
        assert store.get("blob") == b"old"
        assert store.list() == [Entry("blob", 3)]
        self.nothing_unfinished(store)

    @pytest.mark.parametrize("bound", [False, True], ids=["asked", "bound"])
    def test_what_nobody_wants_any_more_is_not_done(self, store: ObjectStore, bound: bool) -> None:
        put(store, "blob", b"old")
        asked: ObjectStore = Until(store, lambda: True) if bound else store
        options = {} if bound else {"cancelled": lambda: True}
        for call in (
            lambda: asked.put("blob", memoryview(b"new"), crc(b"new"), **options),
            lambda: asked.put_new("other", b"new", **options),
            lambda: asked.get("blob", **options),
            lambda: asked.list(**options),
            lambda: asked.delete(["blob"], **options),
        ):
            with pytest.raises(Cancelled):
                call()
        assert store.list() == [Entry("blob", 3)]
        assert store.get("blob") == b"old"

    # one part without a range, and several with one: S3 takes no range of a small object
    @pytest.mark.parametrize("nbytes", [1, 5 * MIB, LARGE])
    def test_a_copy_has_the_same_bytes_and_stays_when_its_source_is_deleted(
        self, store: ObjectStore, nbytes: int
    ) -> None:
        data = os.urandom(nbytes)
        put(store, "step-1/a b", data)
        assert store.copy("step-1/a b", "step-2/blob", nbytes, crc(data))
        store.delete(["step-1/a b"])
        assert store.get("step-2/blob") == data
        assert store.list() == [Entry("step-2/blob", nbytes)]
        self.nothing_unfinished(store)

    def test_a_copy_replaces_and_a_put_of_its_source_does_not_change_it(self, store: ObjectStore) -> None:
        put(store, "source", b"copied")
        put(store, "blob", b"before")
        for _ in range(2):  # the second finds itself there
            assert store.copy("source", "blob", 6, crc(b"copied"))
        put(store, "source", b"later.")
        assert (store.get("blob"), store.get("source")) == (b"copied", b"later.")
        put(store, "blob", b"own")
        assert (store.get("blob"), store.get("source")) == (b"own", b"later.")
        self.nothing_unfinished(store)

    @pytest.mark.parametrize("source", ["gone", "step-9/gone", "shorter", "longer"])
    def test_a_missing_source_or_one_of_another_length_is_not_copied(self, store: ObjectStore, source: str) -> None:
        data = os.urandom(LARGE)
        put(store, "shorter", data[:-1])
        put(store, "longer", b"x" + data)
        assert not store.copy(source, "blob", LARGE, crc(data))
        put(store, "blob", data)
        assert store.get("blob") == data
        self.nothing_unfinished(store)

    def test_a_cancelled_copy_leaves_nothing(self, store: ObjectStore) -> None:
        data = os.urandom(LARGE)
        put(store, "source", data)
        for call in (
            lambda: store.copy("source", "blob", LARGE, crc(data), cancelled=lambda: True),
            lambda: Until(store, lambda: True).copy("source", "blob", LARGE, crc(data)),
        ):
            with pytest.raises(Cancelled):
                call()
        assert [entry.name for entry in store.list()] == ["source"]
        self.nothing_unfinished(store)

    def nothing_unfinished(self, store: ObjectStore) -> None:
        raise NotImplementedError

    def test_a_reader_sees_the_old_blob_or_the_new_one(self, store: ObjectStore) -> None:
        blobs = [bytes([number]) * (5 * MIB + number) for number in range(3)]
        put(store, "blob", blobs[0])
        done = threading.Event()

        def write() -> None:
            for round_ in range(6):
                put(store, "blob", blobs[round_ % 3])
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not done.is_set():
            assert store.get("blob") in blobs
            assert store.list()[0].nbytes in {len(blob) for blob in blobs}
        writer.join()

    def test_of_16_racing_writers_one_makes_the_blob(self, store: ObjectStore) -> None:
        with ThreadPoolExecutor(16) as pool:
            won = [*pool.map(lambda number: store.put_new("manifest", b"by %d" % number), range(16))]
        assert won.count(True) == 1
        assert store.get("manifest") == b"by %d" % won.index(True)
        assert not store.put_new("manifest", b"late")
        self.nothing_unfinished(store)

    def test_put_new_finds_a_blob_that_put_made(self, store: ObjectStore) -> None:
        put(store, "blob", b"there")
        assert not store.put_new("blob", b"there")

    def test_what_is_not_there_is_not_found(self, store: ObjectStore) -> None:
        with pytest.raises(NotFoundError, match="missing"):
            store.get("missing")
        with pytest.raises(NotFoundError, match="step/missing"):
            read(store, "step/missing", 10)

    def test_a_blob_that_is_too_short_or_too_long_is_refused(self, store: ObjectStore) -> None:
        put(store, "blob", b"x" * 100)
        with pytest.raises(CorruptSnapshotError, match="blob"):
            read(store, "blob", 101)
        with pytest.raises(CorruptSnapshotError):
            read(store, "blob", 1, offset=100)
        with pytest.raises(CorruptSnapshotError):
            store.get("blob", limit=99)
        assert len(store.get("blob", limit=100)) == 100

    def test_listing_is_by_prefix_and_folders_are_one_level(self, store: ObjectStore) -> None:
        for name in ("b/1/x", "a/2/x", "a/10/y", "a/10/x", "a/file", "ab", "a b/ü+%20"):
            put(store, name, name.encode())
        assert [entry.name for entry in store.list()] == [
            "a b/ü+%20",
            "a/10/x",
            "a/10/y",
            "a/2/x",
            "a/file",
            "ab",
            "b/1/x",
        ]
        assert [entry.name for entry in store.list("a/1")] == ["a/10/x", "a/10/y"]
        assert [entry.name for entry in store.list("ab")] == ["ab"]
        assert store.list("c/") == []
        assert [*store.folders()] == ["a", "a b", "b"]
        assert [*store.folders("a")] == [*store.folders("a/")] == ["10", "2"]
        assert [*store.folders("nowhere")] == []
        assert store.get("a b/ü+%20") == "a b/ü+%20".encode()

    def test_deleting_is_idempotent_and_takes_empty_folders_along(self, store: ObjectStore) -> None:
        names = [f"step-{number}/x" for number in range(30)]
        for name in [*names, "step-3/y"]:
            put(store, name, b"x")
        store.delete([*names, "never/was"])
        store.delete(names)
        store.delete([])
        assert [entry.name for entry in store.list()] == ["step-3/y"]
        assert [*store.folders()] == ["step-3"]

    @pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "", "a//b", "a/", ".", "a\0b", "x.partial"])
    def test_a_name_that_leaves_the_store_is_refused(self, store: ObjectStore, name: str) -> None:
        for use in (lambda: put(store, name, b"x"), lambda: store.get(name), lambda: store.delete([name])):
            with pytest.raises(ConfigError):
                use()
        with pytest.raises(ConfigError):
            store.list("../")


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"{tmp_path}/a place", deadline_s=10)

    def test_a_copy_is_the_same_file(self, store: FileStore) -> None:
        put(store, "a/source", b"x")
        assert store.copy("a/source", "b/blob", 1, crc(b"x"))
        assert (store.root / "a/source").samefile(store.root / "b/blob")

    @pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMLINK, errno.EXDEV])
    def test_where_a_link_cannot_be_made_nothing_is_copied(
        self, store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        put(store, "source", b"x")

        def refuse(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", refuse)
        assert not store.copy("source", "blob", 1, crc(b"x"))
        assert [entry.name for entry in store.list()] == ["source"]
        self.nothing_unfinished(store)

    def test_a_full_disk_is_an_error(self, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
        put(store, "source", b"x")

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "link", refuse)
        with pytest.raises(UnreachableError, match=r"Cannot write .*/blob"):
            store.copy("source", "blob", 1, crc(b"x"))
        self.nothing_unfinished(store)

    def test_no_link_and_no_pipe_is_copied_and_no_folder_left(self, store: FileStore, tmp_path: Path) -> None:
        (outside := tmp_path / "outside").mkdir()
        (outside / "thesis").write_bytes(b"x")
        put(store, "source", b"x")
        (store.root / "link").symlink_to(outside / "thesis")
        (store.root / "step-1").symlink_to(outside)
        (store.root / "folder").mkdir()
        os.mkfifo(store.root / "pipe")
        for source in ("link", "step-1/thesis", "folder", "pipe"):
            assert not store.copy(source, "blob", 1, crc(b"x"))
        assert not (store.root / "blob").exists()
        assert (outside / "thesis").stat().st_nlink == 1
        self.nothing_unfinished(store)

    def nothing_unfinished(self, store: ObjectStore) -> None:
        root = Path(store.root)  # type: ignore[attr-defined]
        assert [path for path in root.rglob("*") if path.name.endswith(".partial")] == []


@pytest.mark.slow
class TestS3Store(StoreContract):
    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
        url = s3_server.endpoint()
        for name, value in {**s3_server.CREDENTIALS, "AWS_ENDPOINT_URL_S3": url}.items():
            monkeypatch.setenv(name, value)
        bucket = s3_server.new_bucket(url)
        yield (store := open_store(f"s3://{bucket}/jobs/first", deadline_s=10, part_bytes=5 * MIB))
        store.close()
        others = [item["Key"] for item in s3_server.client(url).list_objects_v2(Bucket=bucket).get("Contents", [])]
        assert all(key.startswith("jobs/first/") for key in others)

    def test_bytes_of_another_content_are_not_copied(self, store: S3Store) -> None:
        data = os.urandom(LARGE)
        put(store, "source", data)
        assert not store.copy("source", "blob", LARGE, crc(data[::-1]))
        assert [entry.name for entry in store.list()] == ["source"]
        self.nothing_unfinished(store)

    def test_a_source_that_is_deleted_during_the_copy_is_not_copied(
        self, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = os.urandom(LARGE)
        put(store, "source", data)
        copy_part = store._client.upload_part_copy

        def copy_one(**part: Any) -> Any:
            answer = copy_part(**part)
            store.delete(["source"])
            return answer

        monkeypatch.setattr(store._client, "upload_part_copy", copy_one)
        monkeypatch.setattr(store._multipart, "_streams", 1)
        assert not store.copy("source", "blob", LARGE, crc(data))
        assert store.list() == []
        self.nothing_unfinished(store)

    def nothing_unfinished(self, store: ObjectStore) -> None:
        bucket = store.url.split("/")[2]
        client = s3_server.client(s3_server.endpoint())
        assert client.list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://", "http://host/x", "file://host/x"])
def test_a_url_of_no_known_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        open_store(url)


def test_a_file_url_is_unquoted(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/a%20b").url == open_store(f"{tmp_path}/a b").url
