"""Whose copy is given up when a save needs a slot, and for whom it waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from hyperpod_ext.errors import NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.memory_server.slots.budget import Budget
from hyperpod_ext.runtime.memory_server.slots.pins import Hold, Pin
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme, crc_text

SECRET = b"0123456789abcdef0123456789abcdef"


class Owner:
    """A rank with `slots` slots."""

    def __init__(self, slots: int, stack: ExitStack) -> None:
        self.regions = Regions(kind="own", job="j", secret=SECRET, budget=Budget(None, lambda: 1 << 30), slots=slots)
        stack.callback(self.regions.drop, 0)
        os.close(self.regions.map(0, 100)[1])
        self._stack = stack

    def save(self, step: int, timeout_s: float | None = 0.05) -> bool:
        index = self.regions.next_slot(0, "supersede", timeout_s)
        if index is None:
            return False
        self.regions.begin(0, index, step, f"g1-s{step}", 1)
        self.regions.seal(0, index, {"save_id": f"g1-s{step}", "nbytes": 100, "plan": "", "values": []})
        return True

    def pin(self, step: int, hold: Hold) -> Pin:
        return self._stack.enter_context(self.regions.pin(0, f"g1-s{step}", "test", hold=hold))

    def held(self) -> list[int]:
        return sorted(brief["step"] for brief in self.regions.held())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("holds", "given_up"),
    [
        ((Hold.WAITING, Hold.WAITING), 1),  # of two that wait, the older
        ((Hold.BEGUN, Hold.WAITING), 2),  # what has begun is done first, or none ever would be
        ((Hold.KEPT, Hold.WAITING), 2),  # the next that is due takes its place; nothing does for what is kept
        ((Hold.WAITING, Hold.KEPT), 1),
        ((Hold.KEPT, Hold.KEPT), 1),
        ((Hold.WAITING, Hold.KEPT_BEFORE), 2),
    ],
)
def test_what_costs_least_is_given_up(stack, holds, given_up):
    owner = Owner(3, stack)
    pins = []
    for step, hold in enumerate(holds, 1):
        owner.save(step)
        pins.append(owner.pin(step, hold))
        pins[-1].reading = False
    owner.save(3)
    assert owner.save(4)
    assert owner.held() == [3 - given_up, 3, 4]
    assert [pin.cancelled() for pin in pins] == [given_up == 1, given_up == 2]


@pytest.mark.parametrize("when_busy", ["skip", "wait"])
def test_no_save_is_left_out_or_waits_for_what_is_kept_beside_something_newer(stack, when_busy):
    owner = Owner(3, stack)
    for step, hold in ((1, Hold.KEPT_BEFORE), (2, Hold.KEPT)):
        owner.save(step)
        owner.pin(step, hold)
    owner.save(3)
    assert owner.regions.next_slot(0, when_busy, 0.05) is not None
    assert owner.regions.next_slot(0, when_busy, 0.05) is not None, "asked twice"
    assert owner.save(4)
    assert owner.held() == [2, 3, 4]
    assert owner.regions.next_slot(0, when_busy, 0.05) is not None, "3 is nobody's"


def test_a_snapshot_is_as_dear_as_the_dearest_of_its_pins(stack):
    owner = Owner(3, stack)
    owner.save(1)
    waiting, begun = owner.pin(1, Hold.WAITING), owner.pin(1, Hold.BEGUN)
    owner.save(2)
    other = owner.pin(2, Hold.KEPT)
    for step in (3, 4):
        assert owner.save(step)
    assert [pin.cancelled() for pin in (waiting, begun, other)] == [False, False, True]


def test_a_copy_under_way_that_reads_nothing_yet_is_not_waited_for(stack):
    owner = Owner(2, stack)
    owner.save(1)
    pin = owner.pin(1, Hold.WAITING)
    assert owner.regions.begin_copy(pin)
    owner.save(2)
    assert owner.save(3)
    assert not owner.regions.begin_reading(pin)


def test_a_copy_that_is_being_read_is_waited_for(stack):
    owner = Owner(2, stack)
    owner.save(1)
    pin = owner.pin(1, Hold.WAITING)
    assert owner.regions.begin_copy(pin)
    assert owner.regions.begin_reading(pin)
    owner.save(2)
    assert not owner.save(3)
    assert pin.cancelled()
    assert owner.held() == [1, 2]


def test_who_waits_for_a_slot_and_is_gone_gets_none(stack):
    owner = Owner(2, stack)
    owner.save(1)
    pin = owner.pin(1, Hold.BEGUN)
    owner.save(2)
    gone, looked = threading.Event(), threading.Event()

    def is_gone() -> bool:
        looked.set()
        return gone.is_set()

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(owner.regions.next_slot, 0, "wait", gone=is_gone)
        assert looked.wait(20)
        gone.set()
        owner.regions.wake()
        with pytest.raises(NotFoundError, match="the process of rank 0 ended while it waited for a slot"):
            asked.result(20)
    pin.slot.pins.clear()
    with pytest.raises(NotFoundError, match="the process of rank 0 ended while it waited for a slot"):
        owner.regions.next_slot(0, "wait", gone=is_gone)
    assert not pin.slot.promised


# --- what was checked before the seal -------------------------------------------------------------


@pytest.mark.parametrize("checked", [0, 1, 57, 100])
def test_a_seal_goes_on_where_the_copy_left_off(stack, checked):
    owner = Owner(2, stack)
    owner.regions.begin(0, 0, 1, "g1-s1", 1)
    record = {"save_id": "g1-s1", "nbytes": 100, "plan": "", "values": []}
    before = [checked, crc_text(crc64nvme(bytes(checked)))]
    manifest = owner.regions.seal(0, 0, {**record, "checked": before})
    assert manifest["crc64nvme"] == crc_text(crc64nvme(bytes(100)))
    assert "checked" not in manifest


@pytest.mark.parametrize("checksum", ["-1", "10000000000000000f", "zzzzzzzzzzzzzzzz", ""])
def test_what_is_no_checksum_is_refused(stack, checksum):
    owner = Owner(2, stack)
    owner.regions.begin(0, 0, 1, "g1-s1", 1)
    record = {"save_id": "g1-s1", "nbytes": 100, "plan": "", "values": []}
    with pytest.raises(ValueError, match=r"CRC64|hexadecimal"):  # which the server answers as malformed
        owner.regions.seal(0, 0, {**record, "checked": [1, checksum]})
    assert owner.held() == []


@pytest.mark.parametrize("checked", [-1, 101])
def test_more_than_the_slot_holds_cannot_have_been_checked(stack, checked):
    owner = Owner(2, stack)
    owner.regions.begin(0, 0, 1, "g1-s1", 1)
    record = {"save_id": "g1-s1", "nbytes": 100, "plan": "", "values": []}
    with pytest.raises(NotFoundError, match="not 0 to 100 bytes"):
        owner.regions.seal(0, 0, {**record, "checked": [checked, crc_text(0)]})
    assert owner.held() == []


def test_writers_of_every_older_generation_are_refused(stack):
    regions = Owner(3, stack).regions
    regions.fence(3, None)
    for generation in (1, 2):
        with pytest.raises(StaleGenerationError, match="the job is at generation 3"):
            regions.begin(0, 0, 1, f"g{generation}-s1", generation)
    regions.begin(0, 0, 1, "g3-s1", 3)


def test_a_fence_never_goes_back(stack):
    regions = Owner(3, stack).regions
    regions.fence(3, None)
    regions.fence(2, None)
    with pytest.raises(StaleGenerationError):
        regions.begin(0, 0, 1, "g2-s1", 2)


def test_what_was_given_up_while_its_checksum_was_made_never_exists(stack):
    owner = Owner(3, stack)
    owner.regions.begin(0, 0, 5, "g1-s5", 1)
    owner.regions.fence(2, 4)
    with pytest.raises(StaleGenerationError, match="dropped while it was written"):
        owner.regions.adopt(0, 0, {"save_id": "g1-s5"})
    assert owner.held() == []


def test_the_step_that_a_generation_went_on_from_stays_and_those_after_it_go(stack):
    owner = Owner(4, stack)
    for step in (3, 4, 5):
        owner.save(step)
    owner.regions.fence(2, 4)
    assert owner.held() == [3, 4]


def test_a_slot_that_its_owner_may_write_any_moment_is_copied_no_more(stack):
    owner = Owner(2, stack)
    for step in (1, 2):
        owner.save(step)
    assert owner.regions.next_slot(0) is not None
    with pytest.raises(NotFoundError, match="about to be overwritten"):
        owner.pin(1, Hold.BEGUN)
    with owner.regions.pin(0, "g1-s1", "restore", restoring=True):  # nobody writes while ranks restore
        pass
    owner.pin(2, Hold.BEGUN)


def test_only_what_is_being_written_in_a_slot_is_sealed(stack):
    owner = Owner(2, stack)
    owner.regions.begin(0, 0, 1, "g1-s1", 1)
    with pytest.raises(NotFoundError, match="not being written as g1-s2"):
        owner.regions.seal(0, 0, {"save_id": "g1-s2", "nbytes": 100, "plan": "", "values": []})
    with pytest.raises(NotFoundError, match="not being written as g1-s1"):
        owner.regions.seal(0, 1, {"save_id": "g1-s1", "nbytes": 100, "plan": "", "values": []})
    assert owner.held() == []


def test_regions_that_each_save_outgrows_are_given_back(stack: ExitStack) -> None:
    """As of a tensor that grows by more than a page a step."""
    budget = Budget(None, lambda: 1 << 30)
    regions = Regions(kind="own", job="j", secret=SECRET, budget=budget, slots=2)
    stack.callback(regions.drop, 0)
    for step in range(1, 9):
        nbytes = step * 10_000
        os.close(regions.map(0, nbytes)[1])
        index = regions.next_slot(0)
        assert index is not None
        regions.begin(0, index, step, f"g1-s{step}", 1)
        regions.seal(0, index, {"save_id": f"g1-s{step}", "nbytes": nbytes, "plan": "", "values": []})
    assert sorted(brief["step"] for brief in regions.held()) == [7, 8]
    assert budget._reserved == sum(region.nbytes for region in regions._regions[0])
