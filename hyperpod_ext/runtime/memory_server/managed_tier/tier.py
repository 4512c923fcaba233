"""Stores snapshots in AWS's managed tier, or in another server of its HTTP API, as one blob per rank and step.

AWS's service does not authenticate clients, so every process that can reach it can read, replace and delete blobs. The
checksum in this module detects damage, but not an attack. To detect an attack, the caller must put a signed record at
the start of the blob. AWS's service decides where it stores copies of a blob, and how long it keeps the copies.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

from hyperpod_ext.errors import (
    ConflictError,
    CorruptSnapshotError,
    HyperpodExtError,
    MemoryTierFullError,
    NotFoundError,
    UnreachableError,
)
from hyperpod_ext.runtime.memory_server.managed_tier import shard_meta

# maximum bytes to send or receive at once: they fit into the CPU cache, and are sent within the timeout
PIECE = 1 << 20
MAX_META = 16 << 10  # maximum bytes in the Shard-Meta header; many servers refuse header lines of 64 KiB
MAX_MESSAGE = 1 << 20


class ManagedTier:
    """Client for the blobs of one job. Thread-safe, because each call opens its own connection."""

    AWS_URL = "http://ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local:9200"
    """Address at which AWS's client looks for the service on HyperPod with EKS."""

    def __init__(
        self,
        base_url: str,
        namespace: str,
        world_size: int,
        steps_retained: int = 3,
        *,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        """`timeout` is the maximum time without a byte from the service during a call."""
        url = urlsplit(base_url)
        if url.scheme != "http" or not url.hostname:
            raise ValueError(f"{base_url!r} is not http://HOST:PORT")
        self._host, self._port, self._prefix = url.hostname, url.port or 80, url.path.rstrip("/")
        self._namespace, self._world_size, self._steps_retained = namespace, world_size, steps_retained
        self._timeout_s = timeout.total_seconds()
        self._algorithms = shard_meta.algorithms()
        if not self._algorithms:
            raise HyperpodExtError(
                "no package that computes checksums is installed", hint="pip install 'hyperpod-ext[runtime]'"
            )

    def create(self) -> None:
        """Create the namespace, unless it already exists with the same number of ranks and of steps to retain.

        Raises:
            ConflictError: the namespace exists with a different number of ranks or of steps to retain.
        """
        wanted = {"num_ranks": self._world_size, "steps_to_retain_per_rank": self._steps_retained}
        try:
            found = self._ask("GET", self._namespace_path())
        except NotFoundError:
            query = f"?num_ranks={self._world_size}&steps_retained={self._steps_retained}"
            with suppress(ConflictError):  # another rank has created the namespace first
                self._ask("POST", self._namespace_path() + query)
            found = self._ask("GET", self._namespace_path())
        if not isinstance(found, dict) or {key: found.get(key) for key in wanted} != wanted:
            raise ConflictError(
                f"namespace {self._namespace!r} of the managed tier has {found}, and not {wanted}",
                hint="Give the job another namespace, or delete this one.",
            )

    def put(
        self, rank: int, step: int, parts: Sequence[memoryview | bytes], meta: dict[str, Any] | None = None
    ) -> None:
        """Store the concatenated parts, which are sent without a copy in memory, as the blob of `rank` for `step`.

        `meta` has a few plain values, which are sent in a header together with the checksum.

        Raises:
            MemoryTierFullError: the service has not enough memory.
        """
        views = [memoryview(part).cast("B") for part in parts]
        algorithm, new_checksum = next(iter(self._algorithms.items()))
        checksum = new_checksum()
        for piece in _pieces(views):
            checksum.update(piece)
        header = shard_meta.encode(algorithm, checksum.digest(), meta)
        if len(header) > MAX_META:
            raise ValueError(f"meta needs a header of {len(header)} bytes, which is too long; put it into the blob")
        with self._connection() as connection:
            connection.putrequest("POST", self._blob_path(rank, step))
            connection.putheader("Content-Length", str(sum(len(view) for view in views)))
            connection.putheader("Content-Type", "application/octet-stream")
            connection.putheader("Shard-Meta", header)
            connection.endheaders()
            with suppress(ConnectionError):  # a server may refuse a blob before it is fully sent; its answer says why
                for piece in _pieces(views):
                    connection.send(piece)
            self._check(connection.getresponse())

    def get(self, rank: int, step: int, into: memoryview | None = None) -> tuple[memoryview, dict[str, Any]]:
        """Return the blob of `rank` for `step`, and the blob's `meta`. The blob is at the start of `into`, or in new
        memory if `into` is None.

        Raises:
            NotFoundError: the blob does not exist.
            CorruptSnapshotError: the bytes do not match their checksum.
        """
        with self._connection() as connection:
            connection.request("GET", self._blob_path(rank, step))
            response = self._check(connection.getresponse())
            try:
                algorithm, digest, meta = shard_meta.decode(response.headers.get("Shard-Meta", ""))
                checksum = self._algorithms[algorithm]()
            except ValueError as error:
                raise CorruptSnapshotError(f"rank {rank}'s step {step} in the managed tier: {error}") from None
            except KeyError as error:
                raise HyperpodExtError(
                    f"rank {rank}'s step {step} in the managed tier cannot be verified here: its checksum is {error}",
                    hint="Install a Python package that computes this checksum, such as `xxhash`.",
                ) from None
            data = _receive(response, into)
        for piece in _pieces([data]):
            checksum.update(piece)
        if checksum.digest() != digest:
            raise CorruptSnapshotError(f"rank {rank}'s step {step} in the managed tier does not match its {algorithm}")
        return data, {key: value for key, value in meta.items() if key not in ("checksum", "algorithm")}

    def latest(self) -> list[int]:
        """Return the newest steps that any rank has stored, newest first. A step may lack the blobs of some ranks."""
        try:
            found = self._ask("GET", f"{self._blobs_path()}/latest?limit={self._steps_retained + 2}")
        except NotFoundError:
            return []
        if not isinstance(found, list) or not all(type(step) is int for step in found):
            raise UnreachableError(f"the managed tier returned {found!r:.100} instead of a list of steps")
        return sorted(found, reverse=True)

    def delete(self, rank: int, step: int) -> None:
        """Delete the blob of `rank` for `step`, if it exists."""
        with suppress(NotFoundError):
            self._ask("DELETE", self._blob_path(rank, step))

    @property
    def _quoted(self) -> str:
        return quote(self._namespace, safe="")

    def _namespace_path(self) -> str:
        return f"{self._prefix}/v1/cp/namespaces/{self._quoted}"

    def _blobs_path(self) -> str:
        return f"{self._prefix}/v1/cp/checkpoints/{self._quoted}"

    def _blob_path(self, rank: int, step: int) -> str:
        return f"{self._blobs_path()}/{rank}/{step}"

    def _ask(self, method: str, path: str) -> Any:
        with self._connection() as connection:
            connection.request(method, path, headers={"Content-Length": "0"} if method == "POST" else {})
            content = self._check(connection.getresponse()).read(MAX_MESSAGE)
            try:
                return json.loads(content) if content else None
            except ValueError:
                return content.decode(errors="replace")

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            what = str(error) or type(error).__name__
            raise UnreachableError(f"the managed tier at {self._host}:{self._port}: {what}") from error
        finally:
            connection.close()

    def _check(self, response: http.client.HTTPResponse) -> http.client.HTTPResponse:
        if response.status == 200:
            return response
        body = response.read(MAX_MESSAGE).decode(errors="replace")
        message = f"the managed tier at {self._host}:{self._port} answers {response.status}: {body:.500}"
        match response.status:
            case 404:
                raise NotFoundError(message)
            case 409:
                raise ConflictError(message)
            case 413 | 507:
                raise MemoryTierFullError(message)
        raise UnreachableError(message)


def _pieces(views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


def _receive(response: http.client.HTTPResponse, into: memoryview | None) -> memoryview:
    """Return the whole body of a response. The body is received directly into `into`, or into new memory if `into` is
    None.

    Raises:
        HTTPException: the body ended too early.
    """
    length = response.length
    if length is None:  # a body with chunked encoding, whose length is unknown before its end
        body = memoryview(response.read())
        if into is None:
            return body
        target = _start_of(into, len(body))
        target[:] = body
        return target
    target = memoryview(bytearray(length)) if into is None else _start_of(into, length)
    received = 0
    while received < length:
        count = response.readinto(target[received : received + PIECE])
        if count == 0:
            raise http.client.HTTPException(f"the answer ended after {received} of {length} bytes")
        received += count
    return target


def _start_of(into: memoryview, length: int) -> memoryview:
    view = into.cast("B")
    if len(view) < length:
        raise ValueError(f"the blob has {length} bytes, but the buffer only {len(view)}")
    return view[:length]
