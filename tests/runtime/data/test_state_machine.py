"""Anything may happen to a job between two steps; its samples, slot by slot, are those of the list."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from sampler_machine import machine_of

from hyperpod_ext.runtime.data.sampler import ElasticBatchSampler


def run(examples: int) -> None:
    machine = machine_of(ElasticBatchSampler)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=15,
            deadline=None,
            database=None,
            suppress_health_check=[*HealthCheck],
        ),
    )
    print(f"{machine.steps_checked} steps, {machine.samples_checked} samples")
    assert machine.steps_checked > examples
    assert machine.samples_checked > examples


def test_steps_are_those_of_the_list_whatever_happens() -> None:
    run(100)


@pytest.mark.thorough
@pytest.mark.timeout(7200)
def test_steps_are_those_of_the_list_in_20000_histories() -> None:
    run(int(os.environ.get("HPX_EXAMPLES", "20000")))
