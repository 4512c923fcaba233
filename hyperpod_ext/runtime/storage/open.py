"""The store behind a URL. Each kind is loaded when it is needed: S3 brings botocore."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hyperpod_ext.config.checkpoint import DurableTier, tier_of
from hyperpod_ext.runtime.storage.object_store import ObjectStore, no_place


def open_tier(tier: DurableTier, job: str, *, deadline_s: float = 600.0) -> ObjectStore:
    """The store in which a durable tier has what belongs to one job. Its folder in a directory must not be a link."""
    return _open(type(tier), tier.place, job, deadline_s=deadline_s, **tier.options)


def open_store(url: str, **options: Any) -> ObjectStore:
    """The store at s3://bucket/prefix, file:///path or a path.

    `deadline_s` is how long a call continues to try while nothing gets through; `part_bytes` and `streams` are S3's.
    """
    if (kind := tier_of(url)) is not None:
        return _open(kind, url, **options)
    raise no_place(url)


def _open(kind: type[DurableTier], place: str, job: str = "", **options: Any) -> ObjectStore:
    module, _, name = kind.store.partition(":")
    store: ObjectStore = getattr(import_module(module), name).at(place, job, **options)
    return store
