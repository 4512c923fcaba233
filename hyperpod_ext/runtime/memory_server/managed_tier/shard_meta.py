"""The HTTP header `Shard-Meta`, which contains a blob's checksum, computed by the client that stores the blob.

AWS's client sends `{"checksum": <base64 of xxh3_128>, "algorithm": "xxh3_128"}`. `xxhash` is an optional package.
Without `xxhash`, the server stores and returns the header without checking the blob; clients still check what they
read.
"""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Callable
from typing import Any, Protocol

from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

XXH3 = "xxh3_128"
CRC64 = "crc64nvme"


class Checksum(Protocol):
    """The interface of an incremental checksum."""

    def update(self, data: Any, /) -> object: ...

    def digest(self) -> bytes: ...


class _Crc64:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = crc64nvme(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(8, "big")


def _importable(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def algorithms() -> dict[str, Callable[[], Checksum]]:
    """Return the checksum algorithms that this process can compute, by name. The algorithm of AWS's client is first."""
    known: dict[str, Callable[[], Checksum]] = {}
    if xxhash := _importable("xxhash"):
        known[XXH3] = xxhash.xxh3_128
    if _importable("awscrt"):
        known[CRC64] = _Crc64
    return known


def encode(algorithm: str, digest: bytes, more: dict[str, Any] | None = None) -> str:
    """Return the value of a `Shard-Meta` header. `more` has additional fields, which AWS's client ignores."""
    return json.dumps({**(more or {}), "checksum": base64.b64encode(digest).decode(), "algorithm": algorithm})


def decode(header: str) -> tuple[str, bytes, dict[str, Any]]:
    """Return the checksum's algorithm and digest from a `Shard-Meta` header, and all fields of the header.

    Raises:
        ValueError: the header does not have the form that AWS's client uses.
    """
    try:
        meta = json.loads(header)
        digest = base64.b64decode(meta["checksum"], validate=True)
        algorithm = meta.get("algorithm", XXH3)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"Shard-Meta is not a JSON object with a base64 `checksum`: {error!r}") from None
    if not isinstance(algorithm, str):
        raise ValueError("Shard-Meta's `algorithm` is not a string")
    return algorithm, digest, meta
