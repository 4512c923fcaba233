"""Which steps count where a device works behind the loop."""

from __future__ import annotations

import pytest
import torch

from hyperpod_ext.runtime.state.device_steps import DeviceSteps, device_of


class Mark:
    """A marker that is reached when the test says so."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True


class Gpu:
    """Gives markers, and keeps them."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def record(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]


def at_step_three(gpu: Gpu | None) -> DeviceSteps:
    """Steps 1 to 3 were called."""
    steps = DeviceSteps()
    steps.enter()
    steps.follow(gpu, 0)
    for step in (1, 2, 3):
        steps.queue(step)
    return steps


def test_a_cpu_has_done_what_it_was_told() -> None:
    steps = at_step_three(None)
    steps.freeze()
    assert (steps.finished(), steps.is_good(3), steps.may_change(), steps.wait()) == (3, True, True, True)


def test_a_step_counts_once_its_marker_is_reached() -> None:
    gpu = Gpu()
    steps = at_step_three(gpu)
    assert steps.finished() == 0
    gpu.marks[0].reached = gpu.marks[1].reached = True
    assert steps.finished() == 2
    gpu.marks[2].reached = True
    assert steps.finished() == 3


def test_what_is_reached_after_the_abort_does_not_count() -> None:
    gpu = Gpu()
    steps = at_step_three(gpu)
    gpu.marks[0].reached = True
    steps.freeze()
    gpu.marks[1].reached = gpu.marks[2].reached = True
    steps.freeze()
    assert (steps.finished(), steps.is_good(1), steps.is_good(2)) == (1, True, False)
    assert not steps.wait()


def test_an_optimizer_that_comes_after_the_abort_is_stopped() -> None:
    gpu = Gpu()
    steps = at_step_three(gpu)
    for mark in gpu.marks:
        mark.reached = True
    assert steps.may_change()
    steps.freeze()
    assert not steps.may_change()
    steps.queue(4)
    assert (steps.finished(), steps.is_good(3), steps.is_good(4)) == (3, True, False)


def test_the_next_generation_begins_where_it_goes_on_from() -> None:
    gpu = Gpu()
    steps = at_step_three(gpu)
    gpu.marks[0].reached = True
    steps.freeze()
    steps.enter()
    assert steps.finished() == 1, "a second fault may come before anything is restored"
    steps.follow(gpu, 2)
    assert (steps.finished(), steps.may_change(), steps.wait()) == (2, True, True)


@pytest.mark.parametrize("tensors", [[], [torch.zeros(1)], [torch.zeros(1, device="meta")]])
def test_nothing_works_behind_a_cpu(tensors: list[torch.Tensor]) -> None:
    assert device_of(tensors) is None
