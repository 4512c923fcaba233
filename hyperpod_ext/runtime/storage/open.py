"""Open the store of a URL. Each kind is imported when first used: S3 imports botocore."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hyperpod_ext.config.checkpoint import DurableTier, tier_of
from hyperpod_ext.runtime.storage.object_store import ObjectStore, no_place


def open_tier(tier: DurableTier, job: str, *, deadline_s: float = 600.0) -> ObjectStore:
    """Return the store with one job's files of a durable tier. In a directory, the job's folder must not be a link."""
    return _open(type(tier), tier.place, job, deadline_s=deadline_s, **tier.options)


def open_store(url: str, **options: Any) -> ObjectStore:
    """Return the store at s3://bucket/prefix, file:///path or a path.

    Options: `deadline_s`, how long a call retries without progress; for S3 also `part_bytes` and `streams`.
    """
    if (kind := tier_of(url)) is not None:
        return _open(kind, url, **options)
    raise no_place(url)


def _open(kind: type[DurableTier], place: str, job: str = "", **options: Any) -> ObjectStore:
    module, _, name = kind.store.partition(":")
    store: ObjectStore = getattr(import_module(module), name).at(place, job, **options)
    return store
