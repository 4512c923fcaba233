"""A run has one adapter."""

from __future__ import annotations

import pytest

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.adapters import check_adapter
from hyperpod_ext.integrations.titan import RunCheckpointer
from hyperpod_ext.runtime import Run, resilient


def test_a_second_adapter_of_another_kind_is_refused() -> None:
    @resilient
    def train(run: Run) -> None:
        RunCheckpointer(run, total=1)
        RunCheckpointer(run, total=1)
        check_adapter(run, "ResilientAccelerator")

    with pytest.raises(JobFailedError, match="ResilientAccelerator was created after RunCheckpointer in one job"):
        train()


def test_another_run_may_have_another_adapter() -> None:
    for name in ("ResilientAccelerator", "RunCheckpointer"):

        def train(run: Run, name: str = name) -> None:
            check_adapter(run, name)
            run.restore()

        resilient(train)()


def test_a_later_call_of_the_same_run_may_have_another_adapter() -> None:
    @resilient
    def train(run: Run) -> None:
        check_adapter(run, "ResilientAccelerator")
        run.generation += 1
        check_adapter(run, "RunCheckpointer")
        run.generation -= 1
        run.restore()

    train()
