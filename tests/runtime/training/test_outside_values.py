"""Numbers that a call of the training function computes from themselves begin each call as they began the first."""

from __future__ import annotations

import argparse

import pytest

from hyperpod_ext.runtime.training.outside_values import OutsideValues

args = argparse.Namespace()
count = 0
trained = 0


def divide(n: int) -> None:
    args.batch_size = int(args.batch_size / n)


def train(n: int) -> None:
    """Sets `lr` anew, counts its calls, and divides in another function."""
    global count
    args.lr = 0.1 * n
    count += 1
    divide(n)


def make_step() -> None:
    global trained
    trained += 1


def call(values: OutsideValues, n: int, *, begins: bool = True) -> None:
    values.enter(train)
    train(n)
    if begins:
        values.begin_steps()
        make_step()


@pytest.fixture(autouse=True)
def start(monkeypatch: pytest.MonkeyPatch) -> None:
    args.__dict__.update(batch_size=64, lr=1.0, name="a", flag=True)
    monkeypatch.setitem(globals(), "count", 0)
    monkeypatch.setitem(globals(), "trained", 0)


@pytest.mark.parametrize("begins", [True, False])
def test_each_call_begins_with_the_numbers_before_the_first(begins: bool) -> None:
    warned: list[str] = []
    values = OutsideValues(warned.append)
    call(values, 2, begins=begins)
    for _ in range(2):
        call(values, 2)
        assert (args.batch_size, args.lr, count) == (32, 0.2, 1)
    assert "args.batch_size is 64 again" in "".join(warned)
    assert "it to 32" in "".join(warned)
    assert "args.lr" not in "".join(warned), "it does not depend on its value before"


def test_numbers_that_the_steps_change_stay() -> None:
    values = OutsideValues(lambda _: None)
    values.enter(make_step)
    values.begin_steps()
    make_step()
    values.enter(make_step)
    assert trained == 1
