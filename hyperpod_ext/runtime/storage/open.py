"""Open the object store of a URL. A store's module is imported only when needed, because the S3 store needs boto3."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hyperpod_ext.config.checkpoint import DurableTier, tier_of
from hyperpod_ext.runtime.storage.object_store import ObjectStore, no_place


def open_tier(tier: DurableTier, job: str, *, deadline_s: float = 600.0) -> ObjectStore:
    """Return the store with the files of one job in a durable tier.

    Args:
        tier: the tier; in a tier that is a directory, the job's folder must not be a symbolic link.
        job: name of the job.
        deadline_s: seconds without progress after which a call stops retrying.
    """
    return _open(type(tier), tier.place, job, deadline_s=deadline_s, **tier.options)


def open_store(url: str, **options: Any) -> ObjectStore:
    """Return the store at s3://bucket/prefix, file:///path or a path.

    Options are `deadline_s`, the seconds without progress after which a call stops retrying, and for S3 also
    `part_bytes`, the size of a part of a large blob, and `streams`, the number of parts sent or received at a time.
    """
    if (kind := tier_of(url)) is not None:
        return _open(kind, url, **options)
    raise no_place(url)


def _open(kind: type[DurableTier], place: str, job: str = "", **options: Any) -> ObjectStore:
    module, _, name = kind.store.partition(":")
    store: ObjectStore = getattr(import_module(module), name).at(place, job, **options)
    return store
