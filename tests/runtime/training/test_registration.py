"""Objects of `run.steps(total, **objects)`: which are registered, under which names, and which are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world_of_one import world_of_one

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.training.registration import stateful


def alone(body: Any) -> Any:
    """Run `body(run)` under the decorator."""
    return resilient(body)()


def test_each_object_with_a_state_is_registered_once() -> None:
    """Wrappers, parts, numbers, classes and functions are not."""
    with world_of_one():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters())
        others = {"rate": 0.1, "text": "a", "data": [1], "kind": nn.Linear, "f": alone, "x": torch.ones(1)}
        parts = {"layer": net[0], "raw_net": ddp.module, "compiled": torch.compile(ddp)}
        average = copy.deepcopy(net)
        found = stateful({"ddp": ddp, **others, **parts, "net": net, "optimizer": optimizer, "average": average})
    assert found == {"net": net, "optimizer": optimizer, "average": average}


def test_a_module_without_a_name_of_its_own_has_that_of_its_wrapper() -> None:
    with world_of_one():
        ddp = DistributedDataParallel(nn.Linear(1, 1))
        assert stateful({"parallel": ddp, "ddp": ddp}) == {"ddp": ddp.module}


def test_steps_register_and_restore_local_variables() -> None:
    def train(run: Run) -> list[int]:
        model = run.keep(lambda: nn.Linear(2, 1))
        model = run.data_parallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        made = []
        for epoch in range(2):
            for step in run.steps(2 * (epoch + 1), **locals()):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(1, 2)).sum()).backward()
                scaler.step(optimizer)
                made.append(step)
        return made

    assert alone(train) == [1, 2, 3, 4]


def test_local_variables_without_any_state_are_no_registration() -> None:
    with pytest.raises(JobFailedError, match=r"steps\(\) was called before restore\(\)") as error:
        alone(lambda run: list(run.steps(1, rate=0.1)))
    assert "**locals()" in error.value.hint


def test_an_object_that_was_not_registered_is_named() -> None:
    def train(run: Run) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.restore(model=model)
        parallel = run.data_parallel(model)  # is registered as `model`
        list(run.steps(1, parallel=parallel, optimizer=optimizer))

    with pytest.raises(JobFailedError, match=r"steps\(optimizer=...\): this SGD has a state that is not registered"):
        alone(train)


def test_an_object_called_cast_is_registered() -> None:
    def train(run: Run) -> None:
        cast = nn.Linear(1, 1)
        list(run.steps(1, cast=cast))
        list(run.steps(2, total=cast))

    alone(train)


def test_a_wrapper_that_is_called_before_the_registration_is_refused() -> None:
    def train(run: Run) -> None:
        run.data_parallel(nn.Linear(1, 1))(torch.ones(1))

    with pytest.raises(JobFailedError, match="data_parallel was called before its module was registered"):
        alone(train)


def test_reproducible_sums_need_the_registration_first() -> None:
    with pytest.raises(JobFailedError, match=r"data_parallel\(reproducible=True\) was called before restore\(\)"):
        alone(lambda run: run.data_parallel(nn.Linear(1, 1), reproducible=True))
