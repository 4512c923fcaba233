"""Anything may happen to a job between two steps; its samples, slot by slot, are those of the list."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from sampler_machine import SamplerMachine, WorkerMachine


def run(examples: int, machine: type[SamplerMachine] = SamplerMachine, rules: int = 15) -> None:
    machine.steps_checked = machine.samples_checked = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=rules,
            # a smaller example is worth no thousand starts of processes
            phases=[Phase.generate] if machine is WorkerMachine else [*Phase],
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
@pytest.mark.timeout(1200)
def test_steps_are_those_of_the_list_in_400_histories() -> None:
    run(400)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_steps_are_those_of_the_list_in_20000_histories() -> None:
    run(int(os.environ.get("HPX_EXAMPLES", "20000")))


@pytest.mark.slow
def test_worker_processes_read_the_steps_of_the_list_whatever_happens() -> None:
    run(10, WorkerMachine, rules=10)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_worker_processes_read_the_steps_of_the_list_in_60_histories() -> None:
    run(int(os.environ.get("HPX_EXAMPLES", "60")), WorkerMachine)
