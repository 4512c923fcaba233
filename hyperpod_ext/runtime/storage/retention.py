"""Which checkpoints of a store count, which are kept, and how the others go."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hyperpod_ext.runtime.storage.names import MANIFEST, Found, parse_file
from hyperpod_ext.runtime.storage.object_store import ObjectStore


def without_abandoned(found: Collection[Found], starts: Mapping[int, int]) -> list[Found]:
    """Newest first, without steps that a later generation began before: they are of a history that was given up.

    Args:
        starts: the step at which each generation began.
    """
    alive = [
        one
        for one in found
        if not any(generation > one.generation and step < one.step for generation, step in starts.items())
    ]
    return sorted(alive, reverse=True)


def to_keep(found: Sequence[Found], keep: int, every_steps: int | None, steps: Collection[int]) -> list[Found]:
    """What retention leaves: the newest `keep`, every multiple of `every_steps`, and milestones."""
    newest = sorted(found, reverse=True)[: max(keep, 1)]
    return [
        one
        for one in found
        if one in newest or one.step in steps or (every_steps is not None and one.step % every_steps == 0)
    ]


def is_passed(unfinished: Found, complete: Collection[Found]) -> bool:
    """Whether a checkpoint without a manifest will get none: its generation, or a later one, has saved a later step.

    One of a newer generation may be on its way, however far the history had come which that gave up.
    """
    return any(one.step > unfinished.step and one.generation >= unfinished.generation for one in complete)


def remove(store: ObjectStore, names: Sequence[str]) -> None:
    """Delete a checkpoint's blobs, its manifest first: a folder half deleted must not look like a checkpoint.

    Others in its folder, under names that no checkpoint's files have, stay.
    """
    ours = [name for name in names if parse_file(name) is not None]
    store.delete([name for name in ours if name.endswith(f"/{MANIFEST}")])
    store.delete(ours)
