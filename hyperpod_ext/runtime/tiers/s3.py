"""An S3 prefix as an object store, over boto3 with everything slow taken out of its way.

Payloads are sent straight from the caller's memory, and received into it by the MiB: nothing is buffered here, so
memory does not grow with parts. The payload is not hashed for the signature and not summed by boto3: the snapshot's own
CRC64-NVME goes with it, and S3 refuses what does not match. All retrying is done here, none by boto3.
"""

from __future__ import annotations

import base64
import copy
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from hyperpod_ext.errors import (
    ConfigError,
    CorruptSnapshotError,
    HyperpodExtError,
    NotFoundError,
    Problem,
    UnreachableError,
)
from hyperpod_ext.runtime.tiers.call import PIECE, Body, Call
from hyperpod_ext.runtime.tiers.object_store import (
    MIB,
    Cancelled,
    Entry,
    checked_name,
    checked_prefix,
    ignore,
    never,
)
from hyperpod_ext.runtime.tiers.s3_faults import (
    CutError,
    ShortError,
    SpoiltError,
    TakenError,
    UploadGoneError,
    WrongChecksumError,
    item_error,
    judge,
)

T = TypeVar("T")

PART_BYTES = 64 * MIB
MAX_PARTS = 10_000
BULK = 1000  # names a DeleteObjects request may have
RESUMABLE_S = 1800.0  # a failed put that is not tried again for so long is taken back
CHECK_S = 10.0


def default_streams() -> int:
    """S3 gives one stream some 90 MB/s, so that only many fill a network card; but two to a core is what this process
    can feed: over loopback with 2 cores, 4 streams are as fast as one PUT of the whole, and 8 are 0.6 of it."""
    return min(16, max(4, 2 * (os.cpu_count() or 1)))


class S3Store:
    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        deadline_s: float = 600.0,
        part_bytes: int | None = None,
        streams: int | None = None,
    ) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.deadline_s = deadline_s
        self.part_bytes = part_bytes or PART_BYTES
        self.streams = streams or default_streams()
        self._client = _make_client(self.streams)
        self._lock = threading.Lock()
        self._left: dict[tuple[str, str, int], _Upload] = {}
        """Multipart uploads of puts that gave up, for the next put of the same name, checksum and size."""

    def put(
        self,
        name: str,
        data: memoryview,
        crc64nvme: str,
        *,
        cancelled: Callable[[], bool] = never,
        on_bytes: Callable[[int], None] = ignore,
    ) -> None:
        key, data = self._key(name), data.cast("B")
        call = Call(self.deadline_s, f"{self.url}/{name}", cancelled, on_bytes)
        self._take_back(lambda upload: (upload.key == key and upload.crc != crc64nvme) or upload.is_old())
        if len(data) > self.part_bytes:
            self._put_parts(key, data, crc64nvme, call)
            return
        header = _base64(crc64nvme)

        def attempt() -> None:
            self._send(self._client.put_object, data, call, Key=key, ChecksumCRC64NVME=header)

        try:
            self._persist("write", attempt, call, also=lambda: _crc(data) == crc64nvme)
        except WrongChecksumError:
            raise _changed(call.what) from None

    def put_new(self, name: str, data: bytes, *, cancelled: Callable[[], bool] = never) -> bool:
        call = Call(self.deadline_s, f"{self.url}/{name}", cancelled)
        key, header = self._key(name), _base64(_crc(data))
        tries = 0

        def attempt() -> None:
            nonlocal tries
            tries += 1
            self._client.put_object(Bucket=self.bucket, Key=key, Body=data, IfNoneMatch="*", ChecksumCRC64NVME=header)

        try:
            self._persist("write", attempt, call, also=lambda: True)
        except TakenError:
            # our own, if an earlier try landed and only its answer was lost
            return tries > 1 and self.get(name, cancelled=cancelled) == data
        return True

    def get(self, name: str, limit: int = 64 * MIB, *, cancelled: Callable[[], bool] = never) -> bytes:
        call = Call(self.deadline_s, f"{self.url}/{name}", cancelled)
        key = self._key(name)

        def attempt() -> bytes:
            response = self._client.get_object(Bucket=self.bucket, Key=key, ChecksumMode="ENABLED")
            with response["Body"] as body:
                if response["ContentLength"] > limit:
                    raise CorruptSnapshotError(f"{call.what} has more than the {limit} bytes it may have")
                data = bytes(body.read())
            if response.get("ChecksumCRC64NVME") not in (None, _base64(_crc(data))):
                raise SpoiltError()
            return data

        return self._persist("read", attempt, call)

    def read_into(
        self, name: str, destination: memoryview, offset: int = 0, *, on_bytes: Callable[[int], None] = ignore
    ) -> None:
        destination = destination.cast("B")
        call = Call(self.deadline_s, f"{self.url}/{name}", on_bytes=on_bytes)
        key = self._key(name)
        versions: set[str] = set()

        def read(first: int) -> None:
            part = destination[first : first + self.part_bytes]
            self._read_range(key, part, offset + first, call, versions)

        call.in_streams(read, range(0, len(destination), self.part_bytes), self.streams)
        if len(versions) > 1:
            raise CorruptSnapshotError(f"{call.what} was replaced while it was read", hint="Read it again.")

    def list(self, prefix: str = "", *, cancelled: Callable[[], bool] = never) -> list[Entry]:
        pages = self._pages(self.prefix + checked_prefix(prefix), cancelled)
        found = [Entry(item["Key"][len(self.prefix) :], item["Size"]) for page in pages for item in page["Contents"]]
        return sorted(found, key=lambda entry: entry.name)

    def folders(self, prefix: str = "") -> Sequence[str]:
        folder = checked_prefix(prefix).rstrip("/")
        start = f"{self.prefix}{folder}/" if folder else self.prefix
        pages = self._pages(start, never, Delimiter="/")
        return sorted(item["Prefix"][len(start) : -1] for page in pages for item in page["CommonPrefixes"])

    def delete(self, names: Sequence[str], *, cancelled: Callable[[], bool] = never) -> None:
        keys = [self._key(name) for name in names]
        self._take_back(lambda upload: upload.key in keys)
        for first in range(0, len(keys), BULK):
            self._delete_bulk(keys[first : first + BULK], cancelled)

    def close(self) -> None:
        self._take_back(lambda upload: True)

    def check(self) -> None:
        hasty = copy.copy(self)
        hasty.deadline_s = min(CHECK_S, self.deadline_s)
        hasty.list(probe := f".check-{secrets.token_hex(8)}")  # a listing says best what is wrong with a bucket
        hasty.put_new(probe, b"probe")
        if hasty.get(probe) != b"probe" or probe not in {entry.name for entry in hasty.list(probe)}:
            raise UnreachableError(f"{self.url} does not give back what was written to it")
        hasty.delete([probe])

    def _put_parts(self, key: str, data: memoryview, crc: str, call: Call) -> None:
        while True:
            upload = self._begin(key, data, crc, call)
            try:
                self._finish(upload, data, call)
                return
            except UploadGoneError:  # a lifecycle rule or another hand took it, and the parts with it
                call.count(-upload.done_bytes())
            except WrongChecksumError:
                self._abort(upload)
                raise _changed(call.what) from None
            except BaseException:
                if call.gave_up:
                    with self._lock:
                        self._left[upload.identity()] = upload
                else:
                    self._abort(upload)
                raise

    def _finish(self, upload: _Upload, data: memoryview, call: Call) -> None:
        missing = [number for number in upload.numbers() if number not in upload.done]
        call.in_streams(lambda number: self._put_part(upload, number, data, call), missing, self.streams)
        self._complete(upload, call)

    def _begin(self, key: str, data: memoryview, crc: str, call: Call) -> _Upload:
        """The upload that an earlier put of the same bytes left, or a new one."""
        with self._lock:
            left = self._left.pop((key, crc, len(data)), None)
        if left:
            call.count(left.done_bytes())
            return left
        least = -(-len(data) // MAX_PARTS)
        part_bytes = max(self.part_bytes, -(-least // MIB) * MIB)
        answer = self._persist(
            "write",
            lambda: self._client.create_multipart_upload(
                Bucket=self.bucket, Key=key, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
            ),
            call,
        )
        return _Upload(key, crc, len(data), answer["UploadId"], part_bytes)

    def _put_part(self, upload: _Upload, number: int, data: memoryview, call: Call) -> None:
        first = (number - 1) * upload.part_bytes
        part = data[first : first + upload.part_bytes]

        def attempt() -> Any:
            return self._send(
                self._client.upload_part,
                part,
                call,
                Key=upload.key,
                UploadId=upload.id,
                PartNumber=number,
                ChecksumCRC64NVME=_base64(_crc(part)),
            )

        answer = self._persist("write", attempt, call, also=lambda: True)
        upload.done[number] = answer["ETag"]
        upload.touched = time.monotonic()

    def _send(self, request: Callable[..., Any], data: memoryview, call: Call, **options: Any) -> Any:
        body = Body(data, call)
        try:
            return request(Bucket=self.bucket, Body=body, **options)
        except BaseException:
            body.seek(0)  # takes back what was counted
            raise

    def _complete(self, upload: _Upload, call: Call) -> None:
        call.look()
        parts = [{"PartNumber": number, "ETag": upload.done[number]} for number in upload.numbers()]
        try:
            self._persist(
                "write",
                lambda: self._client.complete_multipart_upload(
                    Bucket=self.bucket,
                    Key=upload.key,
                    UploadId=upload.id,
                    MultipartUpload={"Parts": parts},
                    ChecksumCRC64NVME=_base64(upload.crc),
                    ChecksumType="FULL_OBJECT",
                ),
                call,
            )
        except UploadGoneError:
            if not self._is_there(upload, call):  # a completion whose answer was lost has made it
                raise

    def _is_there(self, upload: _Upload, call: Call) -> bool:
        try:
            head = self._persist(
                "read",
                lambda: self._client.head_object(Bucket=self.bucket, Key=upload.key, ChecksumMode="ENABLED"),
                call,
            )
        except NotFoundError:
            return False
        return bool(head["ContentLength"] == upload.nbytes and head.get("ChecksumCRC64NVME") == _base64(upload.crc))

    def _abort(self, upload: _Upload) -> None:
        """Best effort: what stays is the bucket's lifecycle rule to remove."""
        call = Call(min(5.0, self.deadline_s), f"s3://{self.bucket}/{upload.key}")
        try:
            self._persist(
                "delete",
                lambda: self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload.key, UploadId=upload.id),
                call,
            )
        except (HyperpodExtError, UploadGoneError):
            return

    def _take_back(self, unwanted: Callable[[_Upload], bool]) -> None:
        with self._lock:
            gone = [self._left.pop(identity) for identity, upload in [*self._left.items()] if unwanted(upload)]
        for upload in gone:
            self._abort(upload)

    def _read_range(self, key: str, part: memoryview, offset: int, call: Call, versions: set[str]) -> None:
        done = 0

        def attempt() -> None:
            nonlocal done
            wanted = f"bytes={offset + done}-{offset + len(part) - 1}"
            response = self._client.get_object(Bucket=self.bucket, Key=key, Range=wanted)
            with response["Body"] as body:
                total = int(response["ContentRange"].rpartition("/")[2])
                if total < offset + len(part):
                    raise ShortError()
                versions.add(response["ETag"])
                while done < len(part):
                    call.look()
                    received = body.readinto(part[done : done + PIECE])
                    if not received:
                        raise CutError()
                    done += received
                    call.count(received)

        try:
            self._persist("read", attempt, call)  # goes on where the last try was cut
        except ShortError:
            raise CorruptSnapshotError(f"{call.what} ends before byte {offset + len(part)}") from None

    def _delete_bulk(self, keys: Sequence[str], cancelled: Callable[[], bool]) -> None:
        left = [*keys]
        call = Call(self.deadline_s, self.url, cancelled)

        def attempt() -> None:
            nonlocal left
            wanted = {"Objects": [{"Key": key} for key in left], "Quiet": True}
            errors = self._client.delete_objects(Bucket=self.bucket, Delete=wanted).get("Errors", [])
            left = [error["Key"] for error in errors if error["Code"] != "NoSuchKey"]
            if left:
                raise item_error(errors[0])

        self._persist("delete", attempt, call)

    def _pages(self, prefix: str, cancelled: Callable[[], bool], **options: str) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            ask = {"Bucket": self.bucket, "Prefix": prefix, **options, **token}
            call = Call(self.deadline_s, self.url, cancelled)
            page = self._persist("list", partial(self._client.list_objects_v2, **ask), call)
            yield {"Contents": page.get("Contents", []), "CommonPrefixes": page.get("CommonPrefixes", [])}
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _persist(self, doing: str, attempt: Callable[[], T], call: Call, also: Callable[[], bool] = lambda: False) -> T:
        """What `attempt` returns, tried again with rising, random waits while the fault may pass.

        `also` tells whether bytes that arrived wrong were right when they left.
        """
        wait_s = 0.2
        while True:
            call.look()
            try:
                answer = attempt()
                call.progress()
                return answer
            except (Cancelled, HyperpodExtError, ShortError):
                raise
            except Exception as error:
                call.look()  # a body that was told to stop looks like a failed request
                verdict = judge(error, doing, call.what, self.bucket)
            spoilt = isinstance(verdict.error, WrongChecksumError) and also()
            if not (verdict.passes or spoilt):
                raise verdict.error
            if call.seconds_left() <= 0:
                call.gave_up = True
                raise _gave_up(verdict.error, call)
            call.sleep(min(wait_s, call.seconds_left() + 0.01) * random.uniform(0.5, 1.0))
            wait_s = min(wait_s * 2, 20.0)

    def _key(self, name: str) -> str:
        return self.prefix + checked_name(name)


@dataclass
class _Upload:
    """A multipart upload and the parts of it that S3 has."""

    key: str
    crc: str
    nbytes: int
    id: str
    part_bytes: int
    done: dict[int, str] = field(default_factory=dict)
    """Part number → ETag."""
    touched: float = field(default_factory=time.monotonic)

    def identity(self) -> tuple[str, str, int]:
        return self.key, self.crc, self.nbytes

    def numbers(self) -> range:
        return range(1, -(-self.nbytes // self.part_bytes) + 1)

    def done_bytes(self) -> int:
        return sum(min(self.part_bytes, self.nbytes - (number - 1) * self.part_bytes) for number in self.done)

    def is_old(self) -> bool:
        return time.monotonic() - self.touched > RESUMABLE_S


def _make_client(streams: int) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        problem = Problem("the s3 tier needs boto3", hint="pip install 'hyperpod-ext[s3]'")
        raise ConfigError([problem]) from None
    style: dict[str, Any] = {"payload_signing_enabled": False}
    if os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        style["addressing_style"] = "path"  # such endpoints rarely have a DNS name for each bucket
    config = Config(
        s3=style,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=5,
        read_timeout=30,
        max_pool_connections=max(64, streams),
        tcp_keepalive=True,
    )
    return boto3.session.Session().client("s3", config=config)  # the default session is not safe between threads


def _crc(data: memoryview | bytes) -> str:
    from awscrt import checksums

    return f"{checksums.crc64nvme(data):016x}"


def _base64(crc: str) -> str:
    return base64.b64encode(bytes.fromhex(crc)).decode()


def _gave_up(error: Exception, call: Call) -> HyperpodExtError:
    if not isinstance(error, HyperpodExtError):
        return UnreachableError(
            f"Cannot write {call.what}: its bytes arrive damaged each time", hint="Check the network."
        )
    return UnreachableError(f"{error.message}; tried for {call.deadline_s:g} s", hint=error.hint)


def _changed(what: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(
        f"{what} was not written: its bytes do not match the CRC64-NVME they were sealed with",
        hint="The memory changed after it was sealed; earlier checkpoints are untouched.",
    )
