"""A training function run alone, in this process: what it may do, and what it is told when it may not."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import random
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.events.kinds import KINDS
from hyperpod_ext.runtime.process_group import broken_waits
from hyperpod_ext.runtime.training.restore import SoloLink


def test_a_script_runs_as_plain_python():
    made: list[int] = []

    @resilient
    def train(run: Run) -> str:
        model = run.keep(lambda: nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert run.restore(model=model, optimizer=optimizer) == 0
        parallel = run.data_parallel(model)
        for step in run.steps(3):
            optimizer.zero_grad()
            parallel(torch.ones(run.batch_size, 2)).sum().backward()
            optimizer.step()
            run.log(loss=1.0 / step)
            made.append(step)
        return f"rank {run.rank} of {run.world_size}"

    assert train() == "rank 0 of 1"
    assert made == [1, 2, 3]


def alone(body):
    """Run `body(run)` under the decorator."""
    return resilient(body)()


def test_steps_without_restore_is_refused():
    with pytest.raises(JobFailedError, match=r"steps\(\) was called before restore\(\)"):
        alone(lambda run: list(run.steps(1)))


def epochs(run: Run, total: Callable[[int], int]) -> list[int]:
    """Three epochs of ten steps; returns the steps that were made."""
    model = run.keep(lambda: nn.Linear(2, 1))
    run.restore(model=model)
    return [step for epoch in range(3) for step in run.steps(total(epoch))]


def test_steps_of_an_epoch_are_not_taken_for_those_of_the_job():
    """Such a script made 10 of its 30 steps, and the job succeeded."""
    with pytest.raises(JobFailedError, match=r"run.steps\(10\) was called again after step 10") as error:
        alone(lambda run: epochs(run, lambda epoch: 10))
    assert "run.steps((epoch + 1) * steps_per_epoch)" in error.value.hint


def test_steps_that_grow_with_the_epoch_are_all_made():
    assert alone(lambda run: epochs(run, lambda epoch: 10 * (epoch + 1))) == list(range(1, 31))


def test_a_function_that_returns_before_restore_is_told_so():
    """All of them returned, and waited for each other for an hour."""
    with pytest.raises(JobFailedError, match=r"<lambda>\(\) returned without calling run.restore\(\)"):
        alone(lambda run: None)


def fit(steps: int, made: list[int]) -> None:
    """A trainer that knows nothing of a run."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        made.append(step)


@pytest.mark.parametrize("restores", [True, False])
def test_a_trainer_without_an_adapter_is_refused_before_its_first_step(restores: bool) -> None:
    """It made all of its steps, and was then told that it had not called restore; or nobody told it anything."""
    made: list[int] = []

    def train(run: Run) -> None:
        if restores:
            run.restore(model=run.keep(lambda: nn.Linear(2, 1)))
        fit(100, made)

    with pytest.raises(JobFailedError, match=r"SGD.step\(\) was called before the first step of run.steps") as told:
        alone(train)
    assert "docs/integrations.md" in told.value.hint
    assert made == []
    fit(1, made)
    assert made == [0], "what comes after the training function is nobody's"


class Stepping:
    """Makes an optimizer step to build its state, as torch does for `get_optimizer_state_dict`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        self.optimizer.step()
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def test_an_optimizer_step_inside_a_state_dict_is_allowed() -> None:
    @resilient
    def train(run: Run) -> None:
        model = run.keep(lambda: torch.nn.Linear(2, 2))
        run.restore(model=model, optimizer=Stepping(torch.optim.SGD(model.parameters(), lr=0.0)))
        assert list(run.steps(2)) == [1, 2]

    train()


def test_steps_that_build_something_are_made_in_keep_and_after_the_loop() -> None:
    made: list[int] = []

    def train(run: Run) -> None:
        run.keep(lambda: fit(2, made))
        run.restore(model=run.keep(lambda: nn.Linear(2, 1)))
        list(run.steps(1))
        fit(1, made)

    alone(train)
    assert made == [0, 1, 0]


def test_a_function_of_which_a_call_runs_nothing_is_refused():
    def yields(run: Run):
        yield run.step

    async def waits(run: Run) -> None:
        pass

    for train in (yields, waits):
        with pytest.raises(JobFailedError, match=f"{train.__name__}.. is a generator or a coroutine"):
            resilient(train)


def test_what_is_drawn_before_the_first_step_follows_from_the_jobs_seed():
    """On survivors of a fault, which build nothing, too: they read other samples than those that are new."""
    drawn: list[list[object]] = []

    def draw() -> list[object]:
        return [torch.randperm(1000).tolist(), np.random.permutation(1000).tolist(), random.random()]

    def train(run: Run) -> None:
        for _ in range(2):
            random.seed()
            np.random.seed()
            torch.seed()
            run.enter(1, fresh=not drawn)
            model, built = run.keep(lambda: (nn.Linear(1, 1), draw()))
            drawn.append([built, draw()])
        run.restore(model=model)

    alone(train)
    alone(train)
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
    assert drawn[0][0] != drawn[0][1]


def test_a_second_restore_is_refused():
    def train(run: Run) -> None:
        model = nn.Linear(1, 1)
        run.restore(model=model)
        run.restore(model=model)

    with pytest.raises(JobFailedError, match="called twice"):
        alone(train)


def test_a_loop_left_by_break_commits_the_steps_before():
    def train(run: Run) -> int:
        run.restore(model=nn.Linear(1, 1))
        for step in run.steps(5):
            run.log(loss=float("nan"))  # is no reason to stop either
            if step == 3:
                break
        run.log(after=1.0)
        return run.step

    assert alone(train) == 2


Loop = Callable[[Run, Callable[[], None]], None]
"""Makes steps of a run, each by a function."""


def zipped_exactly(run: Run, step: Callable[[], None]) -> None:
    for _, _ in zip(range(run.step, 4), run.steps(4), strict=False):
        step()


def zipped_with_fewer(run: Run, step: Callable[[], None]) -> None:
    for _, _ in zip(range(run.step, 4), run.steps(9), strict=False):
        step()


def zipped_after_steps(run: Run, step: Callable[[], None]) -> None:
    for _, _ in zip(run.steps(9), range(run.step, 4), strict=False):
        step()


def zipped_in_epochs(run: Run, step: Callable[[], None]) -> None:
    for _ in range(2):
        for _, _ in zip(range(2), run.steps(4), strict=False):
            step()


def zipped_and_numbered(run: Run, step: Callable[[], None]) -> None:
    for _, _ in enumerate(zip(range(4), run.steps(4), strict=False)):
        step()


def through(rows: Iterable[Any]) -> Iterator[Any]:
    yield from rows


def zipped_under_a_progress_bar(run: Run, step: Callable[[], None]) -> None:
    for _, _ in through(zip(range(4), run.steps(4), strict=False)):
        step()


def zipped_with_what_raises(run: Run, step: Callable[[], None]) -> None:
    def rows() -> Iterator[int]:
        yield from range(4)
        raise EOFError

    with contextlib.suppress(EOFError):
        for _, _ in zip(rows(), run.steps(9), strict=False):
            step()


def left_before_its_body(run: Run, step: Callable[[], None]) -> None:
    for number in run.steps(9):
        if number == 5:
            return
        step()


def left_within_the_body(run: Run, step: Callable[[], None]) -> None:
    for number in run.steps(9):
        step()
        if number == 5:
            break


def left_under_a_progress_bar(run: Run, step: Callable[[], None]) -> None:
    for _, number in through(zip(range(9), run.steps(9), strict=False)):
        step()
        if number == 5:
            break


def left_by_an_exception(run: Run, step: Callable[[], None]) -> None:
    with contextlib.suppress(EOFError):
        for _, number in zip(range(9), run.steps(9), strict=False):
            step()
            if number == 5:
                raise EOFError


def held_until_the_end(run: Run, step: Callable[[], None]) -> None:
    steps = run.steps(9)
    for _, _ in zip(range(5), steps, strict=False):
        step()


def looped_over(loop: Loop, with_optimizer: bool = True) -> Callable[[Run], int]:
    """A training function that trains in `loop`; returns the newest committed step."""

    def train(run: Run) -> int:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.restore(model=model, **{"optimizer": optimizer} if with_optimizer else {})

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        loop(run, step)
        return run.step

    return train


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize(
    ("loop", "left"),
    [
        *((each, None) for each in (zipped_exactly, zipped_with_fewer, zipped_after_steps, zipped_in_epochs)),
        *((each, None) for each in (zipped_and_numbered, zipped_under_a_progress_bar, zipped_with_what_raises)),
        (left_before_its_body, None),
        *((each, 5) for each in (left_within_the_body, left_under_a_progress_bar, left_by_an_exception)),
        (held_until_the_end, 5),
    ],
)
def test_a_step_that_is_complete_when_its_loop_ends_is_committed_and_another_is_named(
    loop: Loop, left: int | None, with_optimizer: bool, capfd: Any
) -> None:
    """The last step of `zip(loader, run.steps(n))` was left uncommitted silently: zip asks the loader first."""
    assert alone(looped_over(loop, with_optimizer)) == 4
    warned = re.findall(r"train\(\) returned within step (\d+), which is not committed", capfd.readouterr().err)
    assert warned == ([] if left is None else [str(left)])


class Average:
    """Of weights, as people write one."""

    def __init__(self) -> None:
        self.shadow = {name: torch.zeros(2, 2) for name in ("weight", "more")}


def test_the_event_log_says_what_snapshots_hold_and_what_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(SoloLink, "event", lambda link, event, **fields: told.append((event, fields)))

    def train(run: Run) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = Average()
        run.restore(model=model, optimizer=optimizer)
        run.leave_out(nn.Dropout())
        for _ in run.steps(3):
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            for name in average.shadow:
                average.shadow[name] = 0.9 * average.shadow[name] + 0.1 * model.weight.detach()

    alone(train)
    fields = {name: its for name, its in told if name in ("kept", "unsaved")}
    for name, its in fields.items():
        KINDS.decode({"t": 1.0, "event": name, "generation": 1, **json.loads(json.dumps(its))})
    assert fields["kept"] == {
        "rank": 0,
        "objects": {"model": "Linear", "optimizer": "SGD"},
        "left_out": ("Dropout",),
    }
    assert fields["unsaved"] == {"rank": 0, "objects": ["average.shadow (dict)"], "descriptive": [], "unseeded": []}


def test_a_step_in_which_a_collective_has_failed_is_not_committed_whatever_becomes_of_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at: list[int] = []

    def train(run: Run) -> None:
        run.restore(model=nn.Linear(1, 1))
        for step in run.steps(5):
            if step == 3:  # where it is raised, the training function goes on
                monkeypatch.setattr(broken_waits, "_raised", ["Connection closed by peer"])
            at.append(run.step)

    with pytest.raises(
        ConnectionError, match=r"Connection closed by peer \(raised within step 3, and swallowed there\)"
    ):
        alone(train)
    assert at == [0, 1, 2]


def test_half_a_step_is_not_committed_where_its_error_is_swallowed_around_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The statistics of the batch are of step 3, and `run.steps` would commit them as step 2."""
    calls: list[int] = []

    def train(run: Run) -> None:
        model = nn.BatchNorm1d(1)
        run.restore(model=model)
        for _ in range(2):
            with contextlib.suppress(ValueError):
                for step in run.steps(5):
                    calls.append(step)
                    model(torch.ones(2, 1))
                    if step == 3:
                        monkeypatch.setattr(broken_waits, "_raised", ["Connection closed by peer"])
                        raise ValueError

    with pytest.raises(ConnectionError, match="Connection closed by peer"):
        alone(train)
    assert calls == [1, 2, 3]


def test_random_numbers_repeat_from_step_to_step_and_not_between_steps():
    def train(run: Run) -> list[float]:
        run.restore(model=nn.Linear(1, 1))
        return [torch.rand(1).item() for _ in run.steps(3)]

    assert alone(train) == alone(train)
    assert len(set(alone(train))) == 3


def test_a_step_without_its_optimizer_is_committed_with_the_one_that_has_it():
    def train(run: Run) -> list[int]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.restore(model=model, optimizer=optimizer)
        committed = []
        for step in run.steps(6):
            committed.append(run.step)
            model(torch.ones(1, 2)).sum().backward()
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return [*committed, run.step]

    assert alone(train) == [0, 0, 0, 3, 3, 3, 6]


def test_a_generation_may_ask_for_another_interval_of_snapshots():
    def train(run: Run) -> list[int]:
        policy = run.config.checkpoint
        run.enter(2, fresh=False, memory_every=4)
        run.restore(model=nn.Linear(1, 1))
        assert run.config.checkpoint is policy
        return [step for step in range(1, 10) if run._policy.due(step)]

    assert alone(train) == [4, 8]


def test_a_model_can_be_copied_and_saved_whole_in_a_step() -> None:
    """Averages of weights begin as copies; hooks of the run hold what cannot be copied."""

    def train(run: Run) -> None:
        model = run.keep(lambda: nn.Linear(2, 1))
        run.restore(model=model)
        for _ in run.steps(2):
            copied = copy.deepcopy(model)
            assert torch.equal(copied(torch.ones(1, 2)), model(torch.ones(1, 2)))
            torch.save(model, io.BytesIO())

    alone(train)


def test_what_was_left_out_is_let_go_of_after_each_generation():
    """A loader that was left out kept its worker processes, four times as many after three faults."""

    class Rows:
        pass

    def train(run: Run) -> None:
        run.restore(model=run.keep(lambda: nn.Linear(2, 1)))
        rows = Rows()
        run.leave_out(rows)
        assert list(run.steps(3)) == [1, 2, 3]
        held.append(weakref.ref(rows))
        runs.append(run)

    held: list[weakref.ref[Rows]] = []
    runs: list[Run] = []
    alone(train)
    runs[0].leave()
    gc.collect()
    assert held[0]() is None
