"""Live tensors filled from snapshots that were cut otherwise than they are."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.errors import CorruptSnapshotError, JobFailedError
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme, crc_text
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot, fill
from hyperpod_ext.runtime.snapshot.tree import Parts, take_apart

Box = tuple[tuple[int, int], ...]
"""Offset and size of a shard in each dimension."""


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(offset, offset + size) for offset, size in box)].clone()


def sharded(parts: Parts, boxes: list[Box], shape: tuple[int, ...]) -> Layout:
    """Layout of tensors that are declared to be shards of larger ones, as a DTensor's local tensors are."""
    layout = Layout(parts)
    items = tuple(
        item._replace(shape=shape, offsets=tuple(offset for offset, _ in box))
        for item, box in zip(layout.plan.items, boxes, strict=True)
    )
    layout.plan = Plan(layout.plan.shape, items, layout.plan.nbytes)
    return layout


def snapshot(state: dict[str, Any], box: Box, shape: tuple[int, ...]) -> Snapshot:
    """What one rank saved: its shard of `w`, and values."""
    parts = take_apart(state, torch.Tensor)
    layout = sharded(parts, [box] * len(parts.tensors), shape)
    image = bytearray(layout.plan.nbytes)
    layout.write_frames(memoryview(image))
    for source, destination in zip(layout.locals, views(layout.plan, image), strict=True):
        destination.copy_(source)
    manifest = {
        "nbytes": len(image),
        "crc64nvme": crc_text(crc64nvme(image)),
        "rank": 0,
        "step": 1,
        "values": parts.values,
    }
    return Snapshot.of(manifest, layout.plan, lambda: memoryview(image))


def grids(shape: tuple[int, ...], pieces: tuple[int, ...]) -> list[Box]:
    """Boxes of an even cut of each dimension into so many pieces, as Shard() makes it; some may be empty."""
    ranges = []
    for size, count in zip(shape, pieces, strict=True):
        step = math.ceil(size / count)
        starts = [min(size, index * step) for index in range(count)]
        ranges.append([(start, min(step, size - start)) for start in starts])
    boxes = [tuple(box) for box in itertools.product(*ranges)]
    return [box for box in boxes if all(size > 0 for _, size in box)]


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), *(st.tuples(*[st.integers(1, 4)] * len(shape)),) * 2)))
def test_any_cut_can_be_restored_into_any_other(case):
    shape, saved_in, wanted_in = case
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    saved = [snapshot({"w": cut(whole, box), "n": 7}, box, shape) for box in grids(shape, saved_in)]
    saved += saved[:1]  # a replica changes nothing
    for box in grids(shape, wanted_in):
        live = take_apart({"w": torch.full_like(cut(whole, box), -1), "n": 0}, torch.Tensor)
        tree = fill(live, saved, sharded(live, [box], shape))
        assert torch.equal(tree["w"], cut(whole, box))
        assert tree["w"] is live.tensors[0]
        assert tree["n"] == 7


def over_there(one: Snapshot, asked: list[int]) -> Snapshot:
    """The same on another node, which sends parts of it; their bytes are counted."""

    def read(parts: Sequence[tuple[int, memoryview]]) -> None:
        one.check()
        for start, destination in parts:
            destination[:] = one.image[start : start + len(destination)]
            asked.append(len(destination))

    return replace(one, read_parts=read)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), *(st.tuples(*[st.integers(1, 4)] * len(shape)),) * 2)))
def test_of_images_on_other_nodes_only_rows_that_are_needed_are_read(case):
    shape, saved_in, wanted_in = case
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    for box in grids(shape, wanted_in):
        asked: list[int] = []
        saved = [snapshot({"w": cut(whole, their), "n": 7}, their, shape) for their in grids(shape, saved_in)]
        saved = [over_there(one, asked) for one in saved]
        live = take_apart({"w": torch.full_like(cut(whole, box), -1), "n": 0}, torch.Tensor)
        tree = fill(live, saved, sharded(live, [box], shape), lean=True)
        assert torch.equal(tree["w"], cut(whole, box))
        if box != grids(shape, saved_in)[0]:  # else that image serves as it is
            assert not any(one.was_read for one in saved)
            rows = sum(
                math.prod([min(low + size, box[0][0] + box[0][1]) - max(low, box[0][0]), *(s for _, s in rest)])
                for (low, size), *rest in grids(shape, saved_in)
                if all(a < c + d and c < a + b for (a, b), (c, d) in zip(((low, size), *rest), box, strict=True))
            )
            assert sum(asked) == 4 * rows == sum(one.nbytes_read for one in saved)


WHOLE = torch.arange(12, dtype=torch.float32).reshape(4, 3)
TOP, BOTTOM = ((0, 2), (0, 3)), ((2, 2), (0, 3))
ALL = ((0, 4), (0, 3))


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("first", ["rows of it", "all of it"])
def test_a_shard_that_two_snapshots_hold_counts_once_though_of_one_only_rows_are_read(
    first: str, differs: bool
) -> None:
    """As of HSDP, whose replicas are on another node and on this one. What the lower rank has is taken."""
    shape = (4, 3)
    whole = torch.arange(12, dtype=torch.float32).reshape(shape)
    low, middle, high = ((0, 2), (0, 3)), ((1, 2), (0, 3)), ((2, 2), (0, 3))
    top, bottom = (snapshot({"w": cut(whole, box), "n": 7}, box, shape) for box in (low, high))
    other = snapshot({"w": cut(whole, low) - float(differs), "n": 7}, low, shape)
    held = [over_there(top, []), other] if first == "rows of it" else [top, over_there(other, [])]
    live = take_apart({"w": torch.full((2, 3), -1.0), "n": 0}, torch.Tensor)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tree = fill(live, [*held, bottom], sharded(live, [middle], shape))
    assert torch.equal(tree["w"], cut(whole, middle))
    assert any("w differed between ranks" in str(one.message) for one in said) == differs


@pytest.mark.parametrize("own", range(2))
@pytest.mark.parametrize("wanted", [ALL, TOP, ((1, 2), (0, 3)), ((0, 4), (1, 2))])
def test_a_rank_whose_own_snapshot_is_cut_otherwise_reads_those_of_the_others(own: int, wanted: Box) -> None:
    """As when a checkpoint of FSDP is loaded by as many ranks with DDP, HSDP or tensor parallelism."""
    boxes, asked = [TOP, BOTTOM], []
    saved = [snapshot({"w": cut(WHOLE, box), "m": cut(WHOLE, box) * 2, "n": 7}, box, (4, 3)) for box in boxes]

    def others() -> list[Snapshot]:
        asked.append(own)
        return [saved[1 - own]]

    live = take_apart({"w": torch.full_like(cut(WHOLE, wanted), -1), "m": torch.zeros(4, 3), "n": 0}, torch.Tensor)
    tree = fill(live, [replace(saved[own], others=others)], sharded(live, [wanted, ALL], (4, 3)), lean=True)
    assert torch.equal(tree["w"], cut(WHOLE, wanted))
    assert torch.equal(tree["m"], WHOLE * 2)
    assert asked


@pytest.mark.parametrize("turned", [False, True])
def test_an_optimizers_entry_that_some_ranks_lack_is_named_where_it_would_have_to_be_cut(turned: bool) -> None:
    """As of experts, of which those on one rank never had a gradient."""
    entry = {"exp_avg": cut(WHOLE, BOTTOM)}
    saved = [
        snapshot({"w": cut(WHOLE, TOP), "state": {}}, TOP, (4, 3)),
        snapshot({"w": cut(WHOLE, BOTTOM), "state": {0: entry}}, BOTTOM, (4, 3)),
    ]
    live = take_apart({"w": torch.zeros(4, 3), "state": {}}, torch.Tensor)
    with pytest.raises(JobFailedError, match=r"state\.0\.exp_avg: only some ranks have saved this"):
        fill(live, saved[::-1] if turned else saved, like=lambda path: WHOLE if path[0] == "state" else None)


def test_a_rank_whose_own_snapshot_has_all_reads_no_other() -> None:
    def others() -> list[Snapshot]:
        raise AssertionError("nobody needs them")

    for box, wanted in ((ALL, TOP), (TOP, TOP), (TOP, ((1, 1), (0, 3)))):
        own = replace(snapshot({"w": cut(WHOLE, box), "n": 7}, box, (4, 3)), others=others)
        live = take_apart({"w": torch.full_like(cut(WHOLE, wanted), -1), "n": 0}, torch.Tensor)
        assert torch.equal(fill(live, [own], sharded(live, [wanted], (4, 3)))["w"], cut(WHOLE, wanted))


def test_what_no_snapshot_holds_is_named_with_how_much_there_is():
    live = take_apart({"w": torch.zeros(4, 3)}, torch.Tensor)
    with pytest.raises(
        JobFailedError, match="w: the available snapshots have 6 of the 12 elements that this rank needs"
    ):
        fill(live, [snapshot({"w": cut(WHOLE, TOP)}, TOP, (4, 3))])


def test_every_snapshot_that_parts_are_cut_from_is_verified():
    good, bad = (snapshot({"w": cut(WHOLE, box)}, box, (4, 3)) for box in (TOP, BOTTOM))
    bad.image[bad.plan.items[0].data] ^= 1
    live = take_apart({"w": torch.zeros(4, 3)}, torch.Tensor)
    with pytest.raises(CorruptSnapshotError, match="CRC64-NVME"):
        fill(live, [good, bad])


def test_what_only_a_tensor_that_is_not_live_is_put_together_from_is_verified_too():
    good, bad = (snapshot({"w": cut(WHOLE, box), "m": cut(WHOLE, box)}, box, (4, 3)) for box in (TOP, BOTTOM))
    bad.image[bad.plan.items[1].data] ^= 1
    live = take_apart({"w": torch.zeros(2, 3)}, torch.Tensor)
    with pytest.raises(CorruptSnapshotError, match="CRC64-NVME"):
        fill(live, [good, bad], sharded(live, [TOP], (4, 3)), lean=True)


@pytest.mark.parametrize("position", ["frame", "data", "end"])
def test_a_snapshot_that_is_copied_as_it_is_is_verified_to_its_last_byte(position):
    one = snapshot({"w": WHOLE, "more": torch.rand(4, 3)}, ALL, (4, 3))
    item = one.plan.items[0]
    one.image[{"frame": item.start, "data": item.data + 7, "end": one.plan.nbytes - 1}[position]] ^= 1
    with pytest.raises(CorruptSnapshotError, match="CRC64-NVME"):
        fill(take_apart({"w": torch.zeros(4, 3), "more": torch.zeros(4, 3)}, torch.Tensor), [one])


def test_a_tensor_larger_than_the_cache_is_copied_whole():
    large = torch.rand(3, 300_001)
    box = tuple((0, size) for size in large.shape)
    live = take_apart({"w": torch.zeros_like(large)}, torch.Tensor)
    assert torch.equal(fill(live, [snapshot({"w": large}, box, tuple(large.shape))])["w"], large)
    turned = take_apart({"w": torch.zeros_like(large.T).T}, torch.Tensor)  # not contiguous
    assert torch.equal(fill(turned, [snapshot({"w": large}, box, tuple(large.shape))])["w"], large)


def test_a_whole_is_put_together_for_what_nothing_live_stands_for():
    pieces = [snapshot({"w": cut(WHOLE, box)}, box, (4, 3)) for box in (TOP, BOTTOM)]
    tree = fill(take_apart({}, torch.Tensor), pieces)
    assert torch.equal(tree["w"], WHOLE)


def test_a_shard_alone_is_nothing_to_make_a_whole_of():
    with pytest.raises(
        JobFailedError, match="w: the available snapshots have 6 of the 12 elements that this rank needs"
    ):
        fill(take_apart({}, torch.Tensor), [snapshot({"w": cut(WHOLE, TOP)}, TOP, (4, 3))])
