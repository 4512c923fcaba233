"""Find the parts of a snapshot that a rank needs after a change of the world size, to read only these parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hyperpod_ext.runtime.snapshot.layout_plan import Item

_COMPARED = 64 << 10
"""Shards of at most this many bytes are read from every rank, so that differences between replicas are reported."""


def by_name(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Return the items of a plan, grouped by tensor name."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.fqn, []).append(item)
    return found


def parts_for(
    targets: Mapping[str, Sequence[Item]], sources: Sequence[Item], known: Collection[tuple[str, tuple[int, ...]]]
) -> list[Item]:
    """Return the parts of a snapshot's shards that the targets need, each as an item.

    Args:
        targets: the shards that this rank needs, by tensor name.
        sources: the shards in the snapshot.
        known: tensor name and offsets of shards that were read from other snapshots. A large shard in `known` is not
            read again.
    """
    return [
        part
        for source in sources
        if (source.fqn, source.offsets) not in known or source.nbytes <= _COMPARED
        if (part := _rows(targets.get(source.fqn, ()), source)) is not None
    ]


def _rows(targets: Sequence[Item], source: Item) -> Item | None:
    """Return the rows of a saved shard that the targets need, from the first to the last row, as one item.

    Rows are slices along the first dimension, so that the returned item is contiguous in the snapshot. Return None if
    no row is needed.
    """
    meeting = [target for target in targets if meet(target, source)]
    if not meeting:
        return None
    if not source.shape or source.nbytes == 0 or any(target.shape != source.shape for target in meeting):
        return source
    low = max(source.offsets[0], min(target.offsets[0] for target in meeting))
    high = min(source.offsets[0] + source.sizes[0], max(target.offsets[0] + target.sizes[0] for target in meeting))
    row_bytes, before = source.nbytes // source.sizes[0], low - source.offsets[0]
    return source._replace(
        offsets=(low, *source.offsets[1:]),
        sizes=(high - low, *source.sizes[1:]),
        data=source.data + before * row_bytes,
        nbytes=(high - low) * row_bytes,
    )


def meet(target: Item, source: Item) -> bool:
    """Return whether two shards of the same tensor overlap.

    The result is also True if the shapes of the whole tensors differ, so that the caller reports the difference.
    """
    return target.shape != source.shape or all(
        low < other + length and other < low + size
        for low, size, other, length in zip(target.offsets, target.sizes, source.offsets, source.sizes, strict=True)
    )
