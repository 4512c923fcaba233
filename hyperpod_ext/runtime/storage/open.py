"""The store behind a URL. Each kind is loaded when it is needed: S3 brings botocore."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from hyperpod_ext.config.checkpoint import FileTier, S3Tier
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.runtime.storage.object_store import ObjectStore


def url_of(tier: S3Tier | FileTier, job: str) -> str:
    """Where a durable tier has what belongs to one job."""
    base = tier.uri if isinstance(tier, S3Tier) else tier.path
    return f"{base.rstrip('/')}/{job}"


def open_tier(tier: S3Tier | FileTier, job: str, *, deadline_s: float = 600.0) -> ObjectStore:
    """The store in which a durable tier has what belongs to one job. Its folder in a directory must not be a link."""
    if isinstance(tier, S3Tier):
        return open_store(url_of(tier, job), deadline_s=deadline_s)
    from hyperpod_ext.runtime.storage import file

    return file.FileStore(tier.path, job, shared=tier.shared)


def open_store(
    url: str, *, deadline_s: float = 600.0, part_bytes: int | None = None, streams: int | None = None
) -> ObjectStore:
    """The store at s3://bucket/prefix, file:///path or a path.

    `deadline_s` is how long a call goes on trying while nothing gets through; `part_bytes` and `streams` are S3's.
    """
    place = urlsplit(url)
    if place.scheme == "s3" and place.netloc:
        from hyperpod_ext.runtime.storage import s3

        return s3.S3Store(
            place.netloc, place.path.strip("/"), deadline_s=deadline_s, part_bytes=part_bytes, streams=streams
        )
    if place.scheme == "" or (place.scheme == "file" and place.netloc in ("", "localhost")):
        from hyperpod_ext.runtime.storage import file

        return file.FileStore(unquote(place.path) if place.scheme else url)
    problem = Problem(f"{url!r} is no place for checkpoints", hint="Write s3://bucket/prefix, file:///path or a path.")
    raise ConfigError([problem])
