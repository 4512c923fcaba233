"""A durable tier that a test can harm: a directory, or an S3 bucket. Same few functions for both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import s3_server


class Place(Protocol):
    """Where the checkpoints of job "j" lie; names are relative to it."""

    def tier(self, **more: Any) -> dict[str, Any]: ...

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None: ...

    def delete(self, name: str) -> None: ...


@dataclass
class Directory:
    base: Path
    job: str = "j"

    @property
    def root(self) -> Path:
        return self.base / self.job

    def tier(self, **more: Any) -> dict[str, Any]:
        return {"kind": "file", "path": str(self.base), "every_steps": 2, **more}

    def names(self) -> list[str]:
        # folders that are removed meanwhile end `Path.rglob`, not `os.walk`
        return sorted(
            str((Path(folder) / name).relative_to(self.root))
            for folder, _, names in os.walk(self.root)
            for name in names
        )

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def delete(self, name: str) -> None:
        (self.root / name).unlink()


@dataclass
class Bucket:
    url: str = field(default_factory=s3_server.endpoint)
    job: str = "j"

    def __post_init__(self) -> None:
        self.bucket, self.client = s3_server.new_bucket(self.url), s3_server.client(self.url)

    def tier(self, **more: Any) -> dict[str, Any]:
        return {"kind": "s3", "uri": f"s3://{self.bucket}/some/prefix", "every_steps": 2, **more}

    def names(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self._key("")).get("Contents", [])
        return sorted(one["Key"].removeprefix(self._key("")) for one in found)

    def read(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=self._key(name))["Body"].read())

    def write(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self._key(name), Body=data)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self._key(name))

    def _key(self, name: str) -> str:
        return f"some/prefix/{self.job}/{name}"


def folder_of(place: Place, step: int) -> str:
    """The one folder of this step."""
    (folder,) = {name.partition("/")[0] for name in place.names() if name.startswith(f"step-{step:09d}-")}
    return folder


@contextmanager
def harmed(place: Place, name: str, harm: Callable[[bytes], bytes | None]) -> Iterator[None]:
    """What is in `name` replaced by what `harm` makes of it, or deleted; it is whole again afterwards."""
    whole = place.read(name)
    now = harm(whole)
    if now is None:
        place.delete(name)
    else:
        place.write(name, now)
    try:
        yield
    finally:
        place.write(name, whole)


def flip(at: int) -> Callable[[bytes], bytes]:
    """One bit of one byte."""
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
