"""Attributes of a trainer's subclass, as values of a snapshot."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest
import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.remembered import OwnAttributes, OwnCallbacks, Remembered, modules_of


class Base:
    def __init__(self) -> None:
        self.state, self.seen_of_base = 0, 0


class Grouped(Base):
    def __init__(self) -> None:
        super().__init__()
        self._step, self._buffered = 0, None
        self.coefficient, self.counts = 0.5, {"train": defaultdict(list)}
        self.last = deque([1, 2], maxlen=2)
        self._current_step_time, self._metrics = 0.0, defaultdict(list)

    def change(self) -> None:
        self.state, self.seen_of_base, self._step, self.coefficient = 1, 1, 3, 0.25
        self._buffered = [{"ids": torch.arange(6).view(2, 3), "mask": torch.ones(2, dtype=torch.bfloat16)}]
        self.counts["train"]["a"].append((1, "b"))
        self.last.append(3)
        self._current_step_time = 17.0


def test_what_a_subclass_changes_comes_back_in_the_containers_that_it_was_in() -> None:
    trainer = Grouped()
    own = OwnAttributes(trainer, Base)
    remembered = Remembered(own.read, own.write)
    remembered.freeze()
    unchanged = remembered.state_dict()
    trainer.change()
    assert remembered.state_dict() == unchanged, "until the step is committed"
    remembered.freeze()
    assert set(own.read()) == {"_step", "_buffered", "coefficient", "counts", "last"}

    other = Grouped()
    theirs = OwnAttributes(other, Base)
    Remembered(theirs.read, theirs.write).load_state_dict(remembered.state_dict())
    assert (other._step, other.coefficient, other.state) == (3, 0.25, 0)
    (batch,) = other._buffered  # type: ignore[misc]  # a list now
    assert torch.equal(batch["ids"], torch.arange(6).view(2, 3))
    assert batch["mask"].dtype is torch.bfloat16
    other.counts["train"]["new"].append(1)
    assert other.counts["train"]["a"] == [(1, "b")]
    assert other.last == deque([2, 3], maxlen=2)
    other.last.append(4)
    assert len(other.last) == 2


def test_what_no_snapshot_holds_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = Grouped()
    own = OwnAttributes(trainer, Base)
    trainer.pool = object()
    for _ in range(5):
        own.read()
    assert capsys.readouterr().err.count("pool (object) of Grouped changed and cannot be in a snapshot") == 1


def test_modules_that_callbacks_hold_have_names_of_their_own() -> None:
    class Averages:
        def __init__(self) -> None:
            self.average, self.decay = torch.nn.Linear(1, 1), 0.5

    one, two = Averages(), Averages()
    assert modules_of([one, two, object]) == {"Averages.average": one.average, "Averages1.average": two.average}


def test_attributes_of_callbacks_that_the_script_wrote_are_kept() -> None:
    class Patience:
        def __init__(self) -> None:
            self.waited, self.shadow = 0, {"weight": torch.zeros(2)}

    class OfLibrary(torch.nn.Identity):
        pass

    OfLibrary.__module__ = "torch.nn"
    one = Patience()
    own = OwnCallbacks([OfLibrary(), one], object)
    one.waited += 2
    one.shadow["weight"] += 0.5
    other = Patience()
    OwnCallbacks([OfLibrary(), other], object).write(own.read())
    assert other.waited == 2
    assert torch.equal(other.shadow["weight"], torch.full((2,), 0.5))


def test_a_large_attribute_that_changes_is_refused_by_name() -> None:
    """A large one that does not is data."""

    class Averages:
        def __init__(self) -> None:
            self.texts, self.shadow = ["text"] * 300_000, torch.zeros(300_000)

    one = Averages()
    own = OwnAttributes(one, object)
    assert own.read() == {}
    one.shadow += 1
    with pytest.raises(JobFailedError, match=r"Averages.shadow \(Tensor\) holds more than 1 MiB, changes"):
        own.read()
