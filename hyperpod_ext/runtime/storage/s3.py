"""An S3 prefix as an object store, with boto3, but without its slow parts.

Payloads are sent from the caller's memory and received into the caller's memory, one MiB at a time. This store buffers
no payload, so memory use does not grow with the number of parts. boto3 computes neither a hash nor a checksum of the
payload: each payload is sent with the CRC64-NVME that the snapshot already has, and S3 refuses a mismatch. Retries are
made by `s3_requests`, not by boto3.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from hyperpod_ext.errors import CorruptSnapshotError, UnreachableError
from hyperpod_ext.runtime.storage.object_store import (
    MIB,
    Entry,
    checked_name,
    checked_prefix,
    ignore,
    is_name,
    never,
    no_place,
    probe,
)
from hyperpod_ext.runtime.storage.s3_errors import (
    NameInUseError,
    ShortError,
    SpoiltError,
    TruncatedError,
    WrongChecksumError,
    item_error,
)
from hyperpod_ext.runtime.storage.s3_multipart import Multipart
from hyperpod_ext.runtime.storage.s3_requests import Requests, base64_of, changed, checksum
from hyperpod_ext.runtime.storage.transfer import PIECE, Call

PART_BYTES = 64 * MIB
BULK = 1000
"""Maximum number of names in a DeleteObjects request."""
CHECK_S = 10.0
"""Deadline of each call in `check`, in seconds."""


def default_streams() -> int:
    """Return the default number of parallel streams: two per CPU core, but at least 4 and at most 16.

    One stream gets about 90 MB/s from S3, so a network card needs many streams. One core can feed two streams. Measured
    over loopback with 2 cores: 4 streams are as fast as a single PUT of the whole blob, and 8 streams have 0.6 of its
    speed.
    """
    return min(16, max(4, 2 * (os.cpu_count() or 1)))


class S3Store:
    create_only = "If-None-Match"

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
        self._requests = Requests(bucket, self.streams)
        self._client = self._requests.client
        self._multipart = Multipart(
            self._requests, part_bytes=self.part_bytes, streams=self.streams, deadline_s=deadline_s
        )

    @classmethod
    def at(cls, place: str, job: str = "", **options: Any) -> S3Store:
        """Return the store at s3://bucket/prefix."""
        url = urlsplit(place)
        if not url.netloc:
            raise no_place(place)
        return cls(url.netloc, f"{url.path}/{job}".strip("/"), **options)

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
        self._multipart.take_back(lambda upload: (upload.key == key and upload.crc != crc64nvme) or upload.is_old())
        if len(data) > self.part_bytes:
            self._multipart.put(key, data, crc64nvme, call)
            return
        header = base64_of(crc64nvme)

        def attempt() -> None:
            self._requests.send(self._client.put_object, data, call, Key=key, ChecksumCRC64NVME=header)

        try:
            self._requests.persist("write", attempt, call, also=lambda: checksum(data) == crc64nvme)
        except WrongChecksumError:
            raise changed(call.what) from None

    def copy(
        self, source: str, name: str, nbytes: int, crc64nvme: str, *, cancelled: Callable[[], bool] = never
    ) -> bool:
        key, call = self._key(name), Call(self.deadline_s, f"{self.url}/{source} to {name}", cancelled)
        self._multipart.take_back(lambda upload: (upload.key == key and upload.crc != crc64nvme) or upload.is_old())
        return self._multipart.copy(self._key(source), key, nbytes, crc64nvme, call)

    def put_new(self, name: str, data: bytes, *, cancelled: Callable[[], bool] = never) -> bool:
        call = Call(self.deadline_s, f"{self.url}/{name} with {self.create_only}", cancelled)
        key, header = self._key(name), base64_of(checksum(data))
        tries = 0

        def attempt() -> None:
            nonlocal tries
            tries += 1
            self._client.put_object(Bucket=self.bucket, Key=key, Body=data, IfNoneMatch="*", ChecksumCRC64NVME=header)

        try:
            self._requests.persist("write", attempt, call, also=lambda: True)
        except NameInUseError:
            # an earlier try of this call may have written the blob, if only its answer was lost
            return tries > 1 and self.get(name, cancelled=cancelled) == data
        return True

    def get(self, name: str, limit: int = 64 * MIB, *, cancelled: Callable[[], bool] = never) -> bytes:
        call = Call(self.deadline_s, f"{self.url}/{name}", cancelled)
        key = self._key(name)

        def attempt() -> bytes:
            response = self._client.get_object(Bucket=self.bucket, Key=key, ChecksumMode="ENABLED")
            with response["Body"] as body:
                if response["ContentLength"] > limit:
                    raise CorruptSnapshotError(f"{call.what} has more than {limit} bytes, the limit for this file")
                data = bytes(body.read())
            if response.get("ChecksumCRC64NVME") not in (None, base64_of(checksum(data))):
                raise SpoiltError()
            return data

        return self._requests.persist("read", attempt, call)

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
        found = (Entry(item["Key"][len(self.prefix) :], item["Size"]) for page in pages for item in page["Contents"])
        return sorted((entry for entry in found if is_name(entry.name)), key=lambda entry: entry.name)

    def folders(self, prefix: str = "") -> Sequence[str]:
        folder = checked_prefix(prefix).rstrip("/")
        start = f"{self.prefix}{folder}/" if folder else self.prefix
        pages = self._pages(start, never, Delimiter="/")
        found = (item["Prefix"][len(start) : -1] for page in pages for item in page["CommonPrefixes"])
        return sorted(filter(is_name, found))

    def delete(self, names: Sequence[str], *, cancelled: Callable[[], bool] = never) -> None:
        keys = [self._key(name) for name in names]
        self._multipart.take_back(lambda upload: upload.key in keys)
        for first in range(0, len(keys), BULK):
            self._delete_bulk(keys[first : first + BULK], cancelled)

    def close(self) -> None:
        self._multipart.take_back(lambda upload: True)

    def check(self) -> None:
        hasty = copy.copy(self)
        hasty.deadline_s = min(CHECK_S, self.deadline_s)
        hasty.list(".check-")  # a listing gives the clearest error for a wrong bucket
        probe(hasty)

    def _read_range(self, key: str, part: memoryview, offset: int, call: Call, versions: set[str]) -> None:
        done = 0

        def attempt() -> None:
            nonlocal done
            wanted = f"bytes={offset + done}-{offset + len(part) - 1}"
            response = self._client.get_object(Bucket=self.bucket, Key=key, Range=wanted)
            with response["Body"] as body:
                if "ContentRange" not in response:
                    raise UnreachableError(
                        f"{self.url} ignores the header Range, which checkpoints need",
                        hint="Choose a store that supports the header, or upgrade this store.",
                    )
                total = int(response["ContentRange"].rpartition("/")[2])
                if total < offset + len(part):
                    raise ShortError()
                versions.add(response["ETag"])
                while done < len(part):
                    call.look()
                    received = body.readinto(part[done : done + PIECE])
                    if not received:
                        raise TruncatedError()
                    done += received
                    call.count(received)

        try:
            self._requests.persist("read", attempt, call)  # a retry continues after the bytes read so far
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

        self._requests.persist("delete", attempt, call)

    def _pages(self, prefix: str, cancelled: Callable[[], bool], **options: str) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            ask = {"Bucket": self.bucket, "Prefix": prefix, **options, **token}
            call = Call(self.deadline_s, self.url, cancelled)
            page = self._requests.persist("list", partial(self._client.list_objects_v2, **ask), call)
            yield {"Contents": page.get("Contents", []), "CommonPrefixes": page.get("CommonPrefixes", [])}
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _key(self, name: str) -> str:
        return self.prefix + checked_name(name)
