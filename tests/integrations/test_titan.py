"""Steps that somebody else's loop makes: what it says out of turn is an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.steps import Steps
from hyperpod_ext.integrations.titan import RunCheckpointer
from hyperpod_ext.runtime.training.loop import resilient
from hyperpod_ext.runtime.training.run import Run


def alone(train: Callable[[Run, torch.nn.Module], None]) -> None:
    """`train` in a job of this process alone."""

    @resilient
    def whole(run: Run) -> None:
        train(run, run.keep(lambda: torch.nn.Linear(2, 2)))

    whole()


def test_a_loop_that_counts_its_own_steps_makes_those_of_the_run() -> None:
    drawn, committed = [], []

    def train(run: Run, model: torch.nn.Module) -> None:
        with RunCheckpointer(run, total=3, model=model) as checkpointer:
            step = checkpointer.load()
            assert step == 0
            while step < 3:
                step += 1
                drawn.append(torch.rand(()).item())
                checkpointer.save(step, last_step=step == 3)
                committed.append(run.step)

    alone(train)
    again, seeds = drawn.copy(), []
    drawn.clear()
    alone(train)
    assert drawn == again, "a step's random numbers follow from its number"
    assert len(set(drawn)) == 3
    assert committed == [1, 2, 3] * 2

    def plain(run: Run, model: torch.nn.Module) -> None:
        run.restore(model=model)
        seeds.extend(torch.rand(()).item() for _ in run.steps(3))

    alone(plain)
    assert seeds == again, "they are those of run.steps"


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (lambda it: it.save(1), r"save\(1, last_step=False\) was called before load\(\)"),
        (lambda it: (it.load(), it.save(2)), r"save\(2, last_step=False\) was called after step 0 of 3"),
        (lambda it: (it.load(), it.save(1, last_step=True)), "last_step=True"),
        (lambda it: it.load(step=4), r"load\(step=4\): the job continues from step 0"),
    ],
)
def test_a_checkpointer_that_is_called_out_of_turn_says_so(
    calls: Callable[[RunCheckpointer], object], said: str
) -> None:
    def train(run: Run, model: torch.nn.Module) -> None:
        with RunCheckpointer(run, total=3, model=model) as checkpointer:
            calls(checkpointer)

    with pytest.raises(JobFailedError, match=said) as raised:
        alone(train)
    assert raised.value.hint


def test_a_step_that_an_exception_leaves_is_not_committed() -> None:
    def train(run: Run, model: torch.nn.Module) -> None:
        run.restore(model=model)
        steps = Steps(run, 2)

        def leave() -> None:
            with steps:
                steps.begin()
                steps.begin()
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            leave()
        assert run.step == 1

    alone(train)


def test_more_steps_than_were_told_are_refused() -> None:
    def train(run: Run, model: torch.nn.Module) -> None:
        run.restore(model=model)
        with Steps(run, 1) as steps:
            steps.begin()
            steps.begin()

    with pytest.raises(JobFailedError, match="another step after step 1, the last step"):
        alone(train)
    with pytest.raises(JobFailedError, match="number of steps is 0"):
        Steps(None, 0)  # type: ignore[arg-type]  # it is not asked


def test_it_has_the_methods_that_the_trainer_calls() -> None:
    """Those of TorchTitan 0.2.2's CheckpointManager that its Trainer calls beside load and save."""

    def train(run: Run, model: torch.nn.Module) -> None:
        with RunCheckpointer(run, total=1, model=model) as checkpointer:
            checkpointer.load()
            checkpointer.maybe_wait_for_staging()
            checkpointer.save(1, last_step=True)
            checkpointer.maybe_wait_for_saving()

    alone(train)
