"""Parameters that are not trained are copied into each slot once, as long as they do not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from served import JOB, SECRET, Served, serve

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.checkpoint.frozen import weighted_sum
from hyperpod_ext.runtime.checkpoint.overlapped_copy import Room
from hyperpod_ext.runtime.checkpoint.staging import Stager
from hyperpod_ext.runtime.snapshot.tree import take_apart

BASE, TRAINED = 100_000, 64


@pytest.fixture
def server(tmp_path) -> Iterator[Served]:
    with serve(tmp_path, {"kind": "memory", "budget_mib": 64}) as served:
        yield served


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements that were copied, call by call."""
    elements: list[int] = []
    copy = Stager.copy

    def counted(self: Stager, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
        elements.append(sum(source.numel() for source in sources))
        copy(self, sources, destinations)

    monkeypatch.setattr(Stager, "copy", counted)
    return elements


class Adapted(torch.nn.Module):
    """A base that is not trained, and what is."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.full((TRAINED,), value))
        self.base = torch.nn.Parameter(torch.arange(BASE, dtype=torch.float32), requires_grad=False)
        self.more = torch.nn.Parameter(torch.full((3,), value))


def save(checkpointer: Checkpointer, step: int, model: Adapted, **options: Any) -> None:
    with torch.no_grad():
        model.trained.fill_(step)
    parts = take_apart({"model": model.state_dict(keep_vars=True), "step": step}, torch.Tensor)
    checkpointer.save(step, f"g1-s{step}", 1, parts, **options)


def restored(checkpointer: Checkpointer, step: int) -> Adapted:
    model = Adapted(-1.0)
    with torch.no_grad():
        model.base.zero_()
    parts = take_apart({"model": model.state_dict(keep_vars=True), "step": 0}, torch.Tensor)
    checkpointer.restore(parts, [checkpointer.load(0, f"g1-s{step}")])
    return model


def make(server: Served, **options: Any) -> Checkpointer:
    return Checkpointer(server.client(), 0, world_size=1, job=JOB, secret=SECRET, **options)


@pytest.mark.parametrize("how", ["at once", "beside", "with its checksum on the way"])
def test_a_base_that_does_not_change_is_copied_once_into_each_slot(server, copied, monkeypatch, how):
    monkeypatch.setattr(Room, "enough", lambda self: how == "with its checksum on the way")
    checkpointer, model = make(server, overlap=how != "at once"), Adapted(0.0)
    for step in range(1, 9):
        save(checkpointer, step, model)
        checkpointer.wait_staged()
    checkpointer.flush()
    assert sum(count // BASE for count in copied) == 2, "two slots"
    for step in (7, 8):
        model = restored(checkpointer, step)
        assert torch.equal(model.base, torch.arange(BASE, dtype=torch.float32))
        assert model.trained.unique().item() == step


def test_a_change_that_no_counter_tells_of_is_saved(server, copied):
    checkpointer, model = make(server), Adapted(0.0)
    alias = model.base.detach().numpy()
    for step in range(1, 5):
        save(checkpointer, step, model)
    alias[BASE // 2] = -1.0
    for step in (5, 6, 7):
        save(checkpointer, step, model)
    checkpointer.flush()
    assert sum(count // BASE for count in copied) == 4
    assert restored(checkpointer, 7).base[BASE // 2].item() == -1.0


def test_what_is_trained_after_all_is_not_compared_for_ever(server, copied, monkeypatch):
    """As a teacher, whose parameters need no gradient and follow the student's."""
    checkpointer, model = make(server), Adapted(0.0)
    for step in range(1, 9):
        model.base.add_(1)
        save(checkpointer, step, model)
    checkpointer.flush()
    assert sum(count // BASE for count in copied) == 8
    assert restored(checkpointer, 8).base[0].item() == 8.0
    assert checkpointer._frozen is not None
    monkeypatch.setattr(checkpointer._frozen, "_digests", lambda tensors: pytest.fail("it is compared"))
    save(checkpointer, 9, model)


def test_a_base_that_is_damaged_in_its_slot_is_never_restored_and_is_copied_again_after_a_fault(server):
    checkpointer, model = make(server), Adapted(0.0)
    for step in (1, 2, 3):
        save(checkpointer, step, model)
    checkpointer.flush()
    memory, slot_bytes, _ = checkpointer.own_slots()
    for slot in range(2):
        memory[slot * slot_bytes + 5_000] ^= 1
    for step in (4, 5):
        save(checkpointer, step, model)
    checkpointer.flush()
    for step in (4, 5):
        with pytest.raises(CorruptSnapshotError, match="CRC64-NVME"):
            restored(checkpointer, step)
    checkpointer.follow(None, lambda step: True)  # as the restore after a fault does
    for step in (6, 7):
        save(checkpointer, step, model)
    checkpointer.flush()
    assert torch.equal(restored(checkpointer, 7).base, torch.arange(BASE, dtype=torch.float32))


@given(st.binary(max_size=40), st.integers(0, 39), st.integers(1, 255))
def test_a_change_of_one_byte_changes_the_sum(data: bytes, at: int, change: int) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    before = weighted_sum(tensor)
    assert weighted_sum(torch.cat([torch.ones(3, dtype=torch.uint8), tensor])[3:]) == before
    if at < len(data):
        tensor[at] ^= change
        assert weighted_sum(tensor) != before


def test_words_that_change_places_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperpod_ext.runtime.checkpoint.frozen._WORDS", 10)
    tensor = torch.arange(64, dtype=torch.int64)
    sums = {weighted_sum(tensor.roll(shift)) for shift in range(64)}
    assert len(sums) == 64
