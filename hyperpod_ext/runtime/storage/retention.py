"""Decide which checkpoints of a store count and which are kept; delete the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hyperpod_ext.runtime.storage.names import MANIFEST, Found, parse_file
from hyperpod_ext.runtime.storage.object_store import ObjectStore


def without_abandoned(found: Collection[Found], starts: Mapping[int, int]) -> list[Found]:
    """Return the checkpoints newest first, without abandoned ones: a later generation began before their step.

    Args:
        starts: the first step of each generation.
    """
    alive = [
        one
        for one in found
        if not any(generation > one.generation and step < one.step for generation, step in starts.items())
    ]
    return sorted(alive, reverse=True)


def to_keep(found: Sequence[Found], keep: int, every_steps: int | None, steps: Collection[int]) -> list[Found]:
    """Return the checkpoints to keep: the newest `keep`, every multiple of `every_steps`, and milestones."""
    newest = sorted(found, reverse=True)[: max(keep, 1)]
    return [
        one
        for one in found
        if one in newest or one.step in steps or (every_steps is not None and one.step % every_steps == 0)
    ]


def is_passed(unfinished: Found, complete: Collection[Found]) -> bool:
    """Return whether an unfinished checkpoint is given up: its generation or a later one has saved a later step.

    A checkpoint of a newer generation may still be uploading, even if an older generation had reached later steps.
    """
    return any(one.step > unfinished.step and one.generation >= unfinished.generation for one in complete)


def remove(store: ObjectStore, names: Sequence[str]) -> None:
    """Delete a checkpoint's blobs, manifest first: a half deleted folder must not look like a checkpoint.

    Files with other names than a checkpoint's stay.
    """
    ours = [name for name in names if parse_file(name) is not None]
    store.delete([name for name in ours if name.endswith(f"/{MANIFEST}")])
    store.delete(ours)
