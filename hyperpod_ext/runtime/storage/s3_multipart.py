"""Upload or copy blobs to S3 in parts, several at a time. An upload that failed at its deadline can be resumed."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.errors import HyperpodExtError, NotFoundError, UnreachableError
from hyperpod_ext.runtime.storage.object_store import MIB
from hyperpod_ext.runtime.storage.s3_errors import ShortError, UploadGoneError, WrongChecksumError
from hyperpod_ext.runtime.storage.s3_requests import Requests, base64_of, changed, checksum
from hyperpod_ext.runtime.storage.transfer import Call

MAX_PARTS = 10_000
RESUMABLE_S = 1800.0
"""Seconds after which the upload of a failed put is aborted, if no further put resumes the upload."""
_ABORT_S = 5.0


class Multipart:
    """Multipart uploads to one bucket."""

    def __init__(self, requests: Requests, *, part_bytes: int, streams: int, deadline_s: float) -> None:
        self._requests, self._part_bytes, self._streams = requests, part_bytes, streams
        self._client, self._bucket = requests.client, requests.bucket
        self._abort_s = min(_ABORT_S, deadline_s)
        self._lock = threading.Lock()
        self._left: dict[tuple[str, str, int], MultipartUpload] = {}
        """Uploads of puts that failed at their deadline, by object name, checksum and size. A later put of the same
        object resumes the upload."""

    def put(self, key: str, data: memoryview, crc: str, call: Call) -> None:
        """Upload `data`, whose CRC64-NVME is `crc`, to the object `key`."""
        try:
            self._make(key, len(data), crc, call, lambda upload, number: self._put_part(upload, number, data, call))
        except WrongChecksumError:
            raise changed(call.what) from None

    def copy(self, source: str, key: str, nbytes: int, crc: str, call: Call) -> bool:
        """Let S3 copy the object `source`, which should have size `nbytes` and checksum `crc`, to the object `key`.

        S3 verifies the checksum over all parts before the copy becomes visible. Some other stores accept a checksum
        without verifying it, so this method reads the size and the checksum of the copy afterwards.

        Returns:
            Returns False if S3 has not copied the object. If the result is False, the caller must upload the bytes with
            `put`.
        """
        try:
            self._make(key, nbytes, crc, call, lambda upload, number: self._copy_part(upload, number, source, call))
        except (NotFoundError, ShortError, WrongChecksumError):
            return False
        except UnreachableError:
            if call.gave_up:
                raise
            return False  # a store that refuses copies may still accept the following put
        return self._is_there(key, nbytes, crc, call)

    def _make(
        self, key: str, nbytes: int, crc: str, call: Call, make_part: Callable[[MultipartUpload, int], None]
    ) -> None:
        while True:
            upload = self._begin(key, nbytes, crc, call)
            try:
                missing = [number for number in upload.numbers() if number not in upload.done]
                call.in_streams(functools.partial(make_part, upload), missing, self._streams)
                self._complete(upload, call)
                return
            except UploadGoneError:  # start again: a lifecycle rule or a user has deleted the parts
                call.count(-upload.done_bytes())
            except BaseException:
                if call.gave_up:
                    with self._lock:
                        self._left[upload.identity()] = upload
                else:
                    self._abort(upload)
                raise

    def _begin(self, key: str, nbytes: int, crc: str, call: Call) -> MultipartUpload:
        """Return the upload of an earlier put of the same bytes that failed at its deadline, or else a new upload."""
        with self._lock:
            left = self._left.pop((key, crc, nbytes), None)
        if left:
            call.count(left.done_bytes())
            return left
        least = -(-nbytes // MAX_PARTS)
        part_bytes = max(self._part_bytes, -(-least // MIB) * MIB)
        answer = self._requests.persist(
            "write",
            lambda: self._client.create_multipart_upload(
                Bucket=self._bucket, Key=key, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
            ),
            call,
        )
        return MultipartUpload(key, crc, nbytes, answer["UploadId"], part_bytes)

    def _put_part(self, upload: MultipartUpload, number: int, data: memoryview, call: Call) -> None:
        first = (number - 1) * upload.part_bytes
        part = data[first : first + upload.part_bytes]

        def attempt() -> Any:
            return self._requests.send(
                self._client.upload_part,
                part,
                call,
                Key=upload.key,
                UploadId=upload.id,
                PartNumber=number,
                ChecksumCRC64NVME=base64_of(checksum(part)),
            )

        answer = self._requests.persist("write", attempt, call, also=lambda: True)
        upload.done[number] = answer["ETag"]
        upload.touched = time.monotonic()

    def _copy_part(self, upload: MultipartUpload, number: int, source: str, call: Call) -> None:
        part: dict[str, Any] = {"PartNumber": number, "CopySource": {"Bucket": self._bucket, "Key": source}}
        if len(upload.numbers()) > 1:  # S3 copies no ranges of objects up to 5 MB
            first = (number - 1) * upload.part_bytes
            part["CopySourceRange"] = f"bytes={first}-{min(first + upload.part_bytes, upload.nbytes) - 1}"

        def attempt() -> Any:
            return self._client.upload_part_copy(Bucket=self._bucket, Key=upload.key, UploadId=upload.id, **part)

        upload.done[number] = self._requests.persist("copy", attempt, call)["CopyPartResult"]["ETag"]
        upload.touched = time.monotonic()

    def _complete(self, upload: MultipartUpload, call: Call) -> None:
        call.look()
        parts = [{"PartNumber": number, "ETag": upload.done[number]} for number in upload.numbers()]
        try:
            self._requests.persist(
                "write",
                lambda: self._client.complete_multipart_upload(
                    Bucket=self._bucket,
                    Key=upload.key,
                    UploadId=upload.id,
                    MultipartUpload={"Parts": parts},
                    ChecksumCRC64NVME=base64_of(upload.crc),
                    ChecksumType="FULL_OBJECT",
                ),
                call,
            )
        except UploadGoneError:
            # an earlier try may have completed the upload, and only its answer was lost
            if not self._is_there(upload.key, upload.nbytes, upload.crc, call):
                raise

    def _is_there(self, key: str, nbytes: int, crc: str, call: Call) -> bool:
        try:
            head = self._requests.persist(
                "read",
                lambda: self._client.head_object(Bucket=self._bucket, Key=key, ChecksumMode="ENABLED"),
                call,
            )
        except NotFoundError:
            return False
        return bool(head["ContentLength"] == nbytes and head.get("ChecksumCRC64NVME") == base64_of(crc))

    def _abort(self, upload: MultipartUpload) -> None:
        """Try to abort an upload, and ignore errors, because a lifecycle rule of the bucket deletes remaining parts."""
        call = Call(self._abort_s, f"s3://{self._bucket}/{upload.key}")
        try:
            self._requests.persist(
                "delete",
                lambda: self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload.key, UploadId=upload.id),
                call,
            )
        except (HyperpodExtError, UploadGoneError):
            return

    def take_back(self, unwanted: Callable[[MultipartUpload], bool]) -> None:
        """Abort those kept uploads of failed puts for which `unwanted` returns True."""
        with self._lock:
            gone = [self._left.pop(identity) for identity, upload in [*self._left.items()] if unwanted(upload)]
        for upload in gone:
            self._abort(upload)


@dataclass
class MultipartUpload:
    """A multipart upload and its uploaded parts."""

    key: str
    crc: str
    nbytes: int
    id: str
    part_bytes: int
    done: dict[int, str] = field(default_factory=dict)
    """ETag of each uploaded part, by part number."""
    touched: float = field(default_factory=time.monotonic)
    """Time of the last uploaded part, by `time.monotonic`."""

    def identity(self) -> tuple[str, str, int]:
        return self.key, self.crc, self.nbytes

    def numbers(self) -> range:
        return range(1, -(-self.nbytes // self.part_bytes) + 1)

    def done_bytes(self) -> int:
        return sum(min(self.part_bytes, self.nbytes - (number - 1) * self.part_bytes) for number in self.done)

    def is_old(self) -> bool:
        return time.monotonic() - self.touched > RESUMABLE_S
