"""Which slot is written next, and which snapshots a new generation forgets."""

from __future__ import annotations

from hyperpod_ext.runtime.memory_server.slots.slots import (
    Slot,
    State,
    forget_newer,
    may_write,
    newest_sealed,
    pick_slot,
)


def sealed(sequence: int, step: int = 0, generation: int = 1, *pins: str) -> Slot:
    return Slot(State.SEALED, sequence, step, generation, f"g{generation}-s{step}", {"step": step}, set(pins))


def test_the_oldest_is_overwritten_and_never_the_newest():
    slots = [sealed(3), sealed(1), sealed(2)]
    assert newest_sealed(slots) == 0
    assert pick_slot(slots) == 1
    assert not may_write(slots, 0)
    assert may_write(slots, 1)


def test_the_newest_stays_though_all_others_are_in_use():
    slots = [sealed(1, 1, 1, "upload"), sealed(2, 2)]
    assert pick_slot(slots) is None
    assert not any(may_write(slots, index) for index in range(2))


def test_what_is_copied_is_not_overwritten():
    slots = [sealed(1, 1, 1, "upload"), sealed(2, 2), sealed(3, 3)]
    assert pick_slot(slots) == 1
    assert not may_write(slots, 0)


def test_what_was_never_finished_is_overwritten_first():
    slots = [sealed(1, 1), Slot(State.WRITING, 3, 3, 1, "g1-s3"), sealed(2, 2)]
    assert pick_slot(slots) == 1
    assert newest_sealed(slots) == 2


def test_a_slot_that_does_not_exist_is_not_written():
    assert not may_write([sealed(1), sealed(2)], -1)
    assert not may_write([sealed(1), sealed(2)], 2)


def test_a_generation_forgets_what_came_after_the_step_that_it_went_on_from():
    slots = [sealed(1, 3), sealed(2, 4), sealed(3, 5)]
    forget_newer(slots, 4, generation=2)
    assert [slot.sealed for slot in slots] == [True, True, False]


def test_a_generation_does_not_forget_what_it_made_itself():
    slots = [sealed(1, 4), sealed(2, 5, 2)]
    forget_newer(slots, 4, generation=2)
    assert [slot.sealed for slot in slots] == [True, True]
