"""What is asked of S3, and what a lost answer is taken for. A stand-in in this process; nothing is sent."""

from __future__ import annotations

import base64
import re
from contextlib import nullcontext
from typing import Any

import pytest
from awscrt import checksums

from hyperpod_ext.errors import CorruptSnapshotError, UnreachableError
from hyperpod_ext.runtime.storage import s3_requests
from hyperpod_ext.runtime.storage.object_store import MIB
from hyperpod_ext.runtime.storage.s3 import S3Store
from hyperpod_ext.runtime.storage.transfer import Call


class RefusedError(Exception):
    """An answer of S3 that is an error, as boto3 raises it."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class Bucket:
    """Answers as S3 does. `lost`: so many answers do not arrive, though what was asked is done. `taken`: so many
    uploads are gone before they are completed. `replaced`: a blob is another one each time it is read."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.lost = self.taken = 0
        self.replaced = False
        self._parts: dict[int, bytes] | None = None

    def put_object(self, *, Key: str, Body: Any, IfNoneMatch: str = "", **_: Any) -> dict[str, Any]:  # noqa: N803
        self.asked.append("put")
        if IfNoneMatch == "*" and Key in self.blobs:
            raise RefusedError("PreconditionFailed", 412)
        self.blobs[Key] = Body if isinstance(Body, bytes) else _read(Body)
        return self._answer({})

    def get_object(self, *, Key: str, Range: str = "", **_: Any) -> dict[str, Any]:  # noqa: N803
        self.asked.append("get")
        data = self.blobs[Key]
        if not Range:
            return {"Body": _Body(data), "ContentLength": len(data)}
        first, last = map(int, Range.removeprefix("bytes=").split("-"))
        etag = str(self.asked.count("get")) if self.replaced else "1"
        part = {"Body": _Body(data[first : last + 1]), "ContentRange": f"bytes {first}-{last}/{len(data)}"}
        return part | {"ETag": etag}

    def create_multipart_upload(self, **_: Any) -> dict[str, Any]:
        self.asked.append("begin")
        self._parts = {}
        return {"UploadId": "u"}

    def upload_part(self, *, PartNumber: int, Body: Any, **_: Any) -> dict[str, Any]:  # noqa: N803
        self.asked.append("part")
        assert self._parts is not None
        self._parts[PartNumber] = _read(Body)
        return {"ETag": str(PartNumber)}

    def upload_part_copy(
        self,
        *,
        PartNumber: int,  # noqa: N803
        CopySource: dict[str, str],  # noqa: N803
        CopySourceRange: str = "",  # noqa: N803
        **_: Any,
    ) -> dict[str, Any]:
        self.asked.append(f"copy {CopySourceRange}".strip())
        if CopySource["Key"] not in self.blobs:
            raise RefusedError("NoSuchKey", 404)
        data = self.blobs[CopySource["Key"]]
        first, last = map(int, (CopySourceRange or f"bytes=0-{len(data) - 1}").removeprefix("bytes=").split("-"))
        assert self._parts is not None
        self._parts[PartNumber] = data[first : last + 1]
        return self._answer({"CopyPartResult": {"ETag": str(PartNumber)}})

    def complete_multipart_upload(self, *, Key: str, **_: Any) -> dict[str, Any]:  # noqa: N803
        self.asked.append("complete")
        if self.taken:
            self.taken, self._parts = self.taken - 1, None
        if self._parts is None:
            raise RefusedError("NoSuchUpload", 404)
        self.blobs[Key] = b"".join(part for _, part in sorted(self._parts.items()))
        self._parts = None
        return self._answer({})

    def head_object(self, *, Key: str, **_: Any) -> dict[str, Any]:  # noqa: N803
        if Key not in self.blobs:
            raise RefusedError("404", 404)
        crc = checksums.crc64nvme(self.blobs[Key]).to_bytes(8, "big")
        return {"ContentLength": len(self.blobs[Key]), "ChecksumCRC64NVME": base64.b64encode(crc).decode()}

    def _answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        if self.lost:
            self.lost -= 1
            raise ConnectionError("the answer was lost")
        return answer


def _read(body: Any) -> bytes:
    return b"".join(iter(body.read, b""))


class _Body:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> _Body:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self) -> bytes:
        return self._data

    def readinto(self, into: memoryview) -> int:
        part, self._data = self._data[: len(into)], self._data[len(into) :]
        into[: len(part)] = part
        return len(part)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = Bucket()
    monkeypatch.setattr(s3_requests, "_make_client", lambda streams: made)
    monkeypatch.setattr(Call, "sleep", lambda self, seconds: None)
    return made


def put(store: S3Store, data: bytes) -> None:
    store.put("image", memoryview(data), f"{checksums.crc64nvme(data):016x}")


def test_of_two_that_create_one_blob_the_second_is_refused(bucket: Bucket) -> None:
    store = S3Store("b", "p")
    assert store.put_new("manifest.json", b"first")
    assert not store.put_new("manifest.json", b"second")
    assert bucket.blobs == {"p/manifest.json": b"first"}


def test_a_blob_that_was_created_without_an_answer_is_ones_own(bucket: Bucket) -> None:
    bucket.lost = 1
    assert S3Store("b", "p").put_new("manifest.json", b"first")
    assert bucket.asked == ["put", "put", "get"]  # what is there is looked at


def test_a_blob_that_another_created_is_not(bucket: Bucket) -> None:
    bucket.blobs["p/manifest.json"] = b"another's"
    assert not S3Store("b", "p").put_new("manifest.json", b"first")


def test_nor_one_that_another_created_while_the_answer_was_lost(bucket: Bucket) -> None:
    put_object = bucket.put_object

    def overtaken(**options: Any) -> dict[str, Any]:
        if not bucket.asked:
            bucket.asked.append("put")
            bucket.blobs["p/manifest.json"] = b"another's"
            raise ConnectionError("it never came there")
        return put_object(**options)

    bucket.put_object = overtaken  # type: ignore[method-assign]
    assert not S3Store("b", "p").put_new("manifest.json", b"first")


@pytest.mark.parametrize("replaced", [False, True])
def test_parts_of_two_blobs_are_no_blob(bucket: Bucket, replaced: bool) -> None:
    data = bytes(range(256)) * 8 * 1024
    bucket.blobs["p/image"], bucket.replaced = data, replaced
    into = bytearray(len(data))
    with pytest.raises(CorruptSnapshotError, match="replaced while it was read") if replaced else nullcontext():
        S3Store("b", "p", part_bytes=MIB, streams=1).read_into("image", memoryview(into))
    assert into == data


def test_a_completion_without_an_answer_is_done(bucket: Bucket) -> None:
    data, store = bytes(range(256)) * 12 * 1024, S3Store("b", "p", part_bytes=MIB, streams=1)
    bucket.lost = 1
    put(store, data)
    assert bucket.blobs == {"p/image": data}
    assert bucket.asked == ["begin", *["part"] * 3, "complete", "complete"]


def test_an_upload_that_was_taken_away_is_begun_anew(bucket: Bucket) -> None:
    data, store = bytes(range(256)) * 12 * 1024, S3Store("b", "p", part_bytes=MIB, streams=1)
    bucket.taken = 1
    put(store, data)
    assert bucket.blobs == {"p/image": data}
    assert bucket.asked == ["begin", *["part"] * 3, "complete"] * 2


def test_what_never_gets_an_answer_is_given_up_at_its_deadline(bucket: Bucket) -> None:
    bucket.lost = 1_000_000
    with pytest.raises(UnreachableError, match="the answer was lost"):
        S3Store("b", "p", deadline_s=0.0).put("image", memoryview(b"1"), f"{checksums.crc64nvme(b'1'):016x}")


# --- copies ----------------------------------------------------------------------------------------


def copy(store: S3Store, data: bytes) -> bool:
    return store.copy("image", "again", len(data), f"{checksums.crc64nvme(data):016x}")


def test_a_copy_is_made_in_parts_without_their_bytes(bucket: Bucket) -> None:
    data, store = bytes(range(256)) * 10 * 1024, S3Store("b", "p", part_bytes=MIB, streams=1)
    bucket.blobs["p/image"], bucket.lost = data, 2
    assert copy(store, data)
    assert bucket.blobs["p/again"] == data
    ranges = [*["copy bytes=0-1048575"] * 3, "copy bytes=1048576-2097151", "copy bytes=2097152-2621439"]
    assert bucket.asked == ["begin", *ranges, "complete"]


def test_the_only_part_of_a_copy_has_no_range(bucket: Bucket) -> None:
    bucket.blobs["p/image"] = b"small"
    assert copy(S3Store("b", "p"), b"small")
    assert bucket.asked == ["begin", "copy", "complete"]


def test_a_store_that_takes_any_checksum_copies_nothing_else(bucket: Bucket) -> None:
    """The stand-in does not compare the checksum of a completion, as some stores do not."""
    bucket.blobs["p/image"] = b"other"
    assert not copy(S3Store("b", "p"), b"image")


@pytest.mark.parametrize(("code", "status"), [("NotImplemented", 501), ("AccessDenied", 403), ("InvalidRange", 416)])
def test_where_a_copy_is_refused_a_put_has_to_do(bucket: Bucket, code: str, status: int) -> None:
    aborted: list[str] = []

    def refuse(**_: Any) -> None:
        raise RefusedError(code, status)

    bucket.upload_part_copy = refuse  # type: ignore[method-assign,assignment]
    bucket.abort_multipart_upload = lambda **_: aborted.append("abort")  # type: ignore[attr-defined]
    store = S3Store("b", "p")
    assert not copy(store, b"image")
    assert aborted == ["abort"]
    put(store, b"image")
    assert bucket.blobs == {"p/image": b"image"}


def test_a_copy_that_never_gets_an_answer_is_given_up_and_a_put_goes_on_with_it(bucket: Bucket) -> None:
    """It is an error, so that the deadline is not waited for twice."""
    data, store = bytes(range(256)) * 10 * 1024, S3Store("b", "p", part_bytes=MIB, streams=1, deadline_s=0.0)
    bucket.blobs["p/image"] = data
    answer, bucket._answer = bucket._answer, lambda made: made  # type: ignore[method-assign]
    complete = bucket.complete_multipart_upload

    def lose(**_: Any) -> None:
        raise ConnectionError("the answer was lost")

    bucket.complete_multipart_upload = lose  # type: ignore[method-assign,assignment]
    with pytest.raises(UnreachableError, match="the answer was lost"):
        copy(store, data)
    bucket.complete_multipart_upload, bucket._answer = complete, answer  # type: ignore[method-assign]
    bucket.asked.clear()
    store.put("again", memoryview(data), f"{checksums.crc64nvme(data):016x}")
    assert bucket.asked == ["complete"]
    assert bucket.blobs["p/again"] == data


# --- stores that lack something --------------------------------------------------------------------


class Lacking(Bucket):
    """`lacks`: what this store does not do, or does not do truly."""

    def __init__(self, lacks: str = "") -> None:
        super().__init__()
        self.lacks = lacks

    def put_object(self, *, IfNoneMatch: str = "", **request: Any) -> dict[str, Any]:  # noqa: N803
        if IfNoneMatch and self.lacks == "implemented":
            raise RefusedError("NotImplemented", 501)
        if IfNoneMatch and self.lacks == "created" and not self.blobs:
            raise RefusedError("PreconditionFailed", 412)
        condition = "" if self.lacks == "conditions" else IfNoneMatch
        return super().put_object(IfNoneMatch=condition, **request)

    def get_object(self, *, Key: str, Range: str = "", **request: Any) -> dict[str, Any]:  # noqa: N803
        answer = super().get_object(Key=Key, Range="" if self.lacks == "ranges" else Range, **request)
        return answer | ({"Body": _Body(b"zeros")} if self.lacks == "bytes" and Range else {})

    def list_objects_v2(self, *, Prefix: str, **_: Any) -> dict[str, Any]:  # noqa: N803
        found = [key for key in self.blobs if key.startswith(Prefix) and self.lacks != "listed"]
        return {"Contents": [{"Key": key, "Size": len(self.blobs[key])} for key in found]}

    def delete_objects(self, *, Delete: dict[str, Any], **_: Any) -> dict[str, Any]:  # noqa: N803
        for item in Delete["Objects"] if self.lacks != "deleted" else ():
            self.blobs.pop(item["Key"], None)
        return {}

    def list_multipart_uploads(self, **_: Any) -> dict[str, Any]:
        return {}


LACKS = {
    "conditions": "replaces a blob that exists, despite If-None-Match",
    "implemented": r"Cannot write s3://bucket/generations/\.check-\w+ with If-None-Match: .*\(NotImplemented",
    "created": "refuses to create a blob of a new name",
    "ranges": "ignores the header Range",
    "bytes": "does not return what was written to it",
    "listed": "does not list what was written to it",
    "deleted": "lists what was deleted from it",
}


def checked(monkeypatch: pytest.MonkeyPatch, bucket: Bucket) -> S3Store:
    monkeypatch.setattr(s3_requests, "_make_client", lambda streams: bucket)
    (store := S3Store("bucket", deadline_s=5.0)).check()
    return store


@pytest.mark.parametrize("lacks", LACKS)
def test_a_store_that_lacks_what_checkpoints_rely_on_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    bucket = Lacking(lacks)
    with pytest.raises(UnreachableError, match=LACKS[lacks]) as caught:
        checked(monkeypatch, bucket)
    assert re.search("upgrade", caught.value.hint, re.IGNORECASE)
    assert not bucket.blobs or lacks == "deleted"


def test_a_store_that_does_all_is_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    checked(monkeypatch, bucket := Lacking())
    assert bucket.blobs == {}


def test_keys_that_no_store_can_name_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = checked(monkeypatch, bucket := Lacking())
    bucket.blobs = dict.fromkeys(["a/b", "../c", "a//b", "a/\x1b[2J", "x\ny", "a.partial"], b"1")
    assert [entry.name for entry in store.list()] == ["a/b"]
