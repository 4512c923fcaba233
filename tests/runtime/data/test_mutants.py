"""The state machine finds every known bug of other samplers: it would find them in ours."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from sampler_machine import machine_of
from sampler_mutants import MUTANTS, SOURCES, mutant

from hyperpod_ext.errors import JobFailedError

RARE = {"StepCounted", "grain_order", "step_over_epochs", "grain_epochs"}


@pytest.mark.parametrize(
    "name",
    # those that take seconds to find are left to `make test-thorough`
    [pytest.param(name, marks=pytest.mark.thorough) if name in RARE else name for name in MUTANTS],
)
def test_a_known_bug_is_found(name: str) -> None:
    with mutant(name) as sampler_class:
        machine = machine_of(sampler_class, sources=SOURCES.get(name))
        with pytest.raises((AssertionError, JobFailedError)) as found:  # or refused as a state that cannot be
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=2000,  # ends at the first that finds it
                    stateful_step_count=15,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],  # that it fails is enough; nobody reads the smallest example
                    report_multiple_bugs=False,
                    suppress_health_check=[*HealthCheck],
                ),
            )
    print(f"{name}: after {machine.steps_checked} steps: {str(found.value).splitlines()[0]}")
    assert machine.samples_checked > 0
