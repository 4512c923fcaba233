"""Decide which checkpoints of a store are valid and which of them are kept; delete the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hyperpod_ext.runtime.storage.names import MANIFEST, Found, parse_file
from hyperpod_ext.runtime.storage.object_store import ObjectStore


def without_abandoned(found: Collection[Found], starts: Mapping[int, int]) -> list[Found]:
    """Return the checkpoints that are not abandoned, newest first.

    A checkpoint is abandoned if a later generation began before its step.

    Args:
        starts: the step after which each generation began.
    """
    alive = [
        one
        for one in found
        if not any(generation > one.generation and step < one.step for generation, step in starts.items())
    ]
    return sorted(alive, reverse=True)


def to_keep(found: Sequence[Found], keep: int, every_steps: int | None, steps: Collection[int]) -> list[Found]:
    """Return the checkpoints to keep.

    Args:
        found: all checkpoints that count.
        keep: number of newest checkpoints to keep, at least 1.
        every_steps: keep each checkpoint whose step is a multiple of this number; None: keep no such checkpoint.
        steps: further steps to keep.
    """
    newest = sorted(found, reverse=True)[: max(keep, 1)]
    return [
        one
        for one in found
        if one in newest or one.step in steps or (every_steps is not None and one.step % every_steps == 0)
    ]


def is_passed(unfinished: Found, complete: Collection[Found]) -> bool:
    """Return whether an unfinished checkpoint will never be completed.

    An unfinished checkpoint is never completed once its own generation, or a later one, has saved a later step. A later
    step of an older generation does not matter, because after a fault the newer generation repeats steps, and may still
    be uploading an earlier step.
    """
    return any(one.step > unfinished.step and one.generation >= unfinished.generation for one in complete)


def remove(store: ObjectStore, names: Sequence[str]) -> None:
    """Delete the files of a checkpoint. The manifest is deleted first, so that a partly deleted folder does not count
    as a checkpoint.

    Args:
        names: names of blobs, of which only files of a checkpoint are deleted.
    """
    ours = [name for name in names if parse_file(name) is not None]
    store.delete([name for name in ours if name.endswith(f"/{MANIFEST}")])
    store.delete(ours)
