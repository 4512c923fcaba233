"""Places of an epoch: every sample in one step, every slot with one rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.runtime.data.positions import Cursor, after, extent_at, owned, steps_per_epoch


@given(st.integers(0, 40), st.integers(1, 12))
def test_every_slot_has_one_rank_and_shares_are_equal_give_or_take_one(slots: int, world_size: int) -> None:
    shares = [owned(slots, rank, world_size) for rank in range(world_size)]
    assert [slot for share in shares for slot in share] == [*range(slots)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def epoch(length: int, batch: int, drop_last: bool) -> list[tuple[int, int]]:
    """Start and count of each step of the first epoch."""
    cursor, steps = Cursor(), []
    while cursor.epoch == 0:
        cursor, extent = extent_at(cursor, length, batch, drop_last)
        steps.append((extent.start, extent.count))
        cursor = after(cursor, extent, length, batch, drop_last)
    assert (cursor.place, cursor.step) == (0, len(steps))
    return steps


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (8, [(0, 4), (4, 4)]),
        (9, [(0, 4), (4, 4), (8, 1)]),  # one sample alone is a step, too
        (11, [(0, 4), (4, 4), (8, 3)]),
        (3, [(0, 3)]),
    ],
)
def test_an_epoch_ends_with_its_last_sample(length: int, steps: list[tuple[int, int]]) -> None:
    assert epoch(length, 4, drop_last=False) == steps
    assert steps_per_epoch(length, 4, drop_last=False) == len(steps)


@pytest.mark.parametrize("length", [8, 9, 11])
def test_with_drop_last_an_epoch_has_whole_batches_only(length: int) -> None:
    assert epoch(length, 4, drop_last=True) == [(0, 4), (4, 4)]
    assert steps_per_epoch(length, 4, drop_last=True) == 2


def test_a_cursor_at_the_end_is_the_beginning_of_the_next_epoch() -> None:
    cursor, extent = extent_at(Cursor(0, 9, 3), 9, 4, drop_last=False)
    assert cursor == Cursor(1, 0, 3)
    assert (extent.start, extent.count) == (0, 4)
    cursor, _ = extent_at(Cursor(0, 8, 2), 9, 4, drop_last=False)
    assert cursor == Cursor(0, 8, 2)  # one sample is left
