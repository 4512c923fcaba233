"""Large plain values are saved as tensors of bytes, and come back as they were."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from hyperpod_ext.errors import CorruptSnapshotError, JobFailedError
from hyperpod_ext.runtime.checkpoint import value_limit
from hyperpod_ext.runtime.checkpoint.value_limit import check_values
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot
from hyperpod_ext.runtime.snapshot.tree import Parts, take_apart
from hyperpod_ext.runtime.state.large_values import KEY, LargeValues, unpack
from hyperpod_ext.runtime.state.training_state import ConsistentStep, TrainingState

MANY = 1 << 18


class Held:
    """A script's object."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held, "count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


@pytest.mark.parametrize(
    "value",
    [
        b"\0x" * MANY,
        "ä\ud800" * MANY,
        list(range(MANY)),
        [0.1, -0.0, float("inf"), None, True] * (MANY // 5 + 1),
        tuple(range(MANY)),
        {number: float(number) for number in range(MANY)},
        [(number, [0.5, number] * 8) for number in range(MANY // 16)],
        OrderedDict(rows=[{"rewards": [1.0] * 15, "done": False}] * (MANY // 16)),
    ],
)
def test_a_large_value_comes_back_as_it_was(value: Any) -> None:
    state = {"held": value, "count": 3, "mixed": [torch.ones(2), {"deep": (value, torch.ones(1))}]}
    packed = LargeValues().pack("own", state)
    assert len(take_apart(packed, torch.Tensor).values) < 9
    again = unpack(packed)
    assert repr(again) == repr(state)
    assert type(again["held"]) is type(value)
    assert state["held"] is value


def test_small_values_are_left_alone() -> None:
    state = {"numbers": list(range(1000)), "text": "a" * 1000, "tensors": [torch.ones(2)]}
    assert LargeValues().pack("own", state) is state
    assert unpack(state) is state


def test_a_value_is_the_same_tensor_until_it_changes() -> None:
    large, value = LargeValues(), list(range(MANY))
    first = large.pack("own", value)[KEY]
    assert large.pack("own", list(value))[KEY] is first
    value[7] = -1
    assert large.pack("own", value)[KEY] is not first
    assert unpack({KEY: first}) == list(range(MANY))


def test_bytes_that_are_no_packed_value_are_refused() -> None:
    packed = LargeValues().pack("own", list(range(MANY)))
    packed[KEY][20:40] = 0
    with pytest.raises(CorruptSnapshotError, match="a large value of a snapshot cannot be read"):
        unpack(packed)


@pytest.mark.parametrize("before", [[], list(range(MANY)), list(range(3 * MANY))])
def test_an_object_with_a_large_value_is_restored_whatever_it_holds_before(before: list[int]) -> None:
    """Its record was one message of 80 MB, which no memory server takes: the job never ended."""
    saved = TrainingState({"model": nn.Linear(2, 2), "own": Held(list(range(2 * MANY)))})
    parts = saved.take().parts
    assert len(str(parts.values)) < 100
    layout = Layout(parts)
    image = bytearray(layout.plan.nbytes)
    for place, tensor in zip(views(layout.plan, image), layout.locals, strict=True):
        place.copy_(tensor)
    new = TrainingState({"model": nn.Linear(2, 2), "own": (own := Held(before))})
    new.load([Snapshot(0, layout.plan, list(parts.values), lambda: memoryview(image))])
    assert own.held == list(range(2 * MANY))
    assert new.digest() == saved.digest()


def test_a_large_value_that_did_not_change_leaves_the_step_whole() -> None:
    state = TrainingState({"own": (own := Held(list(range(MANY))))})
    captured = state.take()
    whole = ConsistentStep(3, "g1-s3", captured.own_digest(), "alike")
    state.commit(captured, whole)
    assert state.consistent_step() is whole
    own.held[0] = 9
    assert state.consistent_step() is None


def test_plain_values_beyond_what_a_record_holds_are_refused_by_name_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing packs them: in the state of a module, and under torch.distributed.checkpoint."""
    monkeypatch.setattr(value_limit, "_MOST_BYTES", 3 << 20)
    check_values(Parts([], [], [1, "a" * 1000, [0.5] * 1000]))
    parts = take_apart({"model": {"extra": "x" * (4 << 20), "other": 1}}, torch.Tensor)
    with pytest.raises(JobFailedError, match=r"the largest is model.extra, up to 4 MiB") as error:
        check_values(parts)
    assert "Store it as a tensor" in error.value.hint
