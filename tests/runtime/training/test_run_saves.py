"""What a step's report says of its snapshot, and what the memory server hears of steps without one."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
import torch

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.training.restore import Restored, SoloLink
from hyperpod_ext.runtime.training.run import Run


class Recorder(SoloLink):
    def __init__(self) -> None:
        super().__init__()
        self.snapshots: list[tuple[int, int]] = []
        """Step, and how many snapshots its report tells of."""
        self.restored = 0

    def restore(self, *_: Any) -> Restored:
        return Restored(self.restored)

    def event(self, event: str, **fields: Any) -> None:
        if event == "step":
            self.snapshots.append((fields["step"], fields.get("snapshot", 0)))


class Saves:
    """In place of a checkpointer; skips what it is told to skip."""

    def __init__(self) -> None:
        self.skip: set[int] = set()
        self.fail: set[int] = set()
        self.heard: list[str] = []
        self.at_once: list[bool] = []
        """Of each save: whether it is copied before the next step begins."""

    def save(self, step: int, *args: Any, at_once: bool, **options: Any) -> bool:
        if step in self.fail:
            raise OSError("no space")
        if step in self.skip:
            return False
        self.at_once.append(at_once)
        self.heard.append(f"save {step}")
        return True

    def stepped(self) -> None:
        self.heard.append("stepped")

    def reserve(self, nbytes: int) -> None: ...

    def follow(self, *_: Any) -> None: ...

    def wait_staged(self) -> bool:
        return True

    def flush(self) -> bool:
        return True


def make_steps(run: Run, total: int) -> None:
    model = torch.nn.Linear(2, 2)
    run.restore(model=model)
    for _ in run.steps(total):
        pass


@pytest.fixture
def saves() -> Saves:
    return Saves()


@pytest.fixture
def run(saves: Saves) -> Run:
    tiers = ({"kind": "memory", "every_steps": 2}, {"kind": "peer", "every_steps": 2})
    document = {"name": "job", "nodes": 1, "workers_per_node": 1}
    document |= {"checkpoint": {"tiers": tiers}, "restart": {"compare_replicas_every": 0}}  # there are no groups
    return Run(RuntimeConfig.model_validate(document), 0, 0, Recorder(), saves)  # type: ignore[arg-type]


def test_a_step_whose_save_is_skipped_counts_as_one_without_a_save(run: Run, saves: Saves) -> None:
    saves.skip = {2}
    run.enter(1, fresh=True)
    make_steps(run, 4)
    assert saves.heard == ["save 0", "stepped", "stepped", "stepped", "save 4"]


def test_a_step_that_is_made_again_without_a_save_tells_of_none(run: Run, saves: Saves) -> None:
    run.enter(1, fresh=True)
    make_steps(run, 4)
    run._link.snapshots.clear()  # type: ignore[attr-defined]
    saves.skip = {0, 2, 4}
    run.enter(2, fresh=True)
    make_steps(run, 4)
    assert run._link.snapshots == [(1, 0), (2, 0), (3, 0), (4, 0)]  # type: ignore[attr-defined]


def test_the_first_snapshot_of_a_job_is_copied_before_its_first_step(run: Run, saves: Saves) -> None:
    """Averages that change without the optimizer make a snapshot be given up: of step 0 there is no earlier one."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    run.enter(1, fresh=True)
    run.restore(model=model, optimizer=optimizer)
    for _ in run.steps(4):
        optimizer.step()
    assert saves.at_once == [True, False, False]


class Loader:
    """Of so many batches, in each of which a weight changes."""

    def __init__(self, run: Run, batches: int) -> None:
        self._run, self._batches = run, batches
        self.model = torch.nn.Linear(2, 2)

    def make_steps(self, total: int) -> None:
        self._run.restore(model=self.model)
        for _ in zip(range(self._batches), self._run.steps(total), strict=False):
            with torch.no_grad():
                self.model.weight.add_(1)


def test_a_loop_that_resumes_after_its_last_step_saves_it_though_its_loader_is_empty(run: Run, saves: Saves) -> None:
    run._link.restored = 4  # type: ignore[attr-defined]
    run.enter(2, fresh=False)
    Loader(run, 0).make_steps(4)
    assert saves.heard == ["save 4"]


def test_an_error_in_the_last_save_of_a_loop_that_its_loader_ends_is_raised_when_it_returns(
    run: Run, saves: Saves
) -> None:
    saves.fail = {4}
    run.enter(1, fresh=True)
    Loader(run, 4).make_steps(9)
    with pytest.raises(OSError, match="no space"):
        run.check_returned("train")
    assert run._link.snapshots[-1] == (4, 0)  # type: ignore[attr-defined]  # others may go on from it


def test_a_step_whose_loader_raises_is_not_committed_once_its_generation_is_left(run: Run) -> None:
    """The script holds the loop, which is closed when the frames of the failed call are cleared."""
    model = torch.nn.Linear(2, 2)

    def rows() -> Iterator[int]:
        yield from range(4)
        raise EOFError

    def train() -> None:
        run.restore(model=model)
        steps = run.steps(9)
        for _ in zip(rows(), steps, strict=False):
            with torch.no_grad():
                model.weight.add_(1)

    def leave_at_error() -> None:
        try:
            train()
        except EOFError as error:
            run.drop_aborted()
            traceback.clear_frames(error.__traceback__)

    run.enter(1, fresh=True)
    # as the code that calls a training function: its module is of the package
    names = {**globals(), "__name__": "hyperpod_ext.runtime.training.loop"}
    FunctionType(leave_at_error.__code__, names, closure=leave_at_error.__closure__)()
    assert run.step == 3
