"""Writers that do not know that they are too late: they change nothing that others restore."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from durable_place import folder_of, harmed
from served import JOB, SECRET
from small_job import MEMORY, SmallJob, relaunched, trained

from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.open import open_store

PLACES = ["file", pytest.param("s3", marks=pytest.mark.thorough)]
"""Both stores keep one contract, tests/runtime/storage/test_tier_contract.py."""


def draining(job: SmallJob, node: int = 0) -> dict[str, Any]:
    return next(one for one in job.servers[node].ask("status")["copying"] if one["tier"] != "peer")


def checkpoints(job: SmallJob) -> Checkpoints:
    return Checkpoints(open_store(draining(job)["tier"]), job=JOB, secret=SECRET)


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_of_two_runs_that_begin_at_the_same_place_one_is_refused(make_job, place):
    """Both found nothing there, so both are generation 1: whoever brings the first checkpoint has it."""
    first, second = make_job(MEMORY, place.tier()), make_job(MEMORY, place.tier())
    assert (first.resume(), second.resume()) == (0, 0)
    first.train(2)
    names = {name: place.read(name) for name in place.names()}
    second.train(4)
    assert "generation 1 of j belongs to another run of the job" in draining(second)["last_error"]
    assert draining(second)["done"] == 0
    assert {name: place.read(name) for name in place.names()} == names
    first.train(4)
    assert [found.step for found in checkpoints(first).found()] == [4, 2, 0]


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_run_that_was_followed_is_restored_by_nobody(make_job, place):
    """It was cut off, not dead, and goes on saving as generation 1 beside the run that took its place."""
    zombie = trained(make_job(MEMORY, place.tier()), 4)
    heir = make_job(MEMORY, place.tier())
    heir.states = zombie.states
    assert heir.resume() == 4
    assert heir.generation == 2
    for rank in heir.ranks.values():  # another future
        rank.optimizer.param_groups[0]["lr"] = 0.5
    heir.train(6)
    mine = heir.states[6]
    zombie.train(10)
    assert zombie.states[6].keys() == mine.keys()
    third = relaunched(make_job, heir)
    third.states = {6: mine}
    assert third.resume() == 6
    third.assert_holds(6)
    assert {found.generation for found in checkpoints(third).found() if found.step > 4} == {2}


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_steps_that_were_given_up_are_restored_by_nobody_though_they_can_be_read_again(make_job, place):
    """The newest two could not be read once, and training went on from the one before."""
    job = trained(make_job(MEMORY, place.tier(keep=9)), 6)
    heir = relaunched(make_job, job)
    with ExitStack() as harms:
        for step in (4, 6):
            harms.enter_context(harmed(place, f"{folder_of(place, step)}/__0_0.distcp", lambda data: data[:-1]))
        assert heir.resume() == 2
        for rank in heir.ranks.values():  # another future
            rank.optimizer.param_groups[0]["lr"] = 0.5
        heir.train(4)
    third = relaunched(make_job, heir)
    assert third.resume() == 4
    third.assert_holds(4)


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_run_that_was_followed_before_its_first_checkpoint_is_refused(make_job, place):
    """A later generation of another run is there: nothing of the earlier one is written."""
    late = make_job(MEMORY, place.tier())
    assert late.resume() == 0
    checkpoints(late).fence(2, 0, "another run")
    late.train(4)
    assert (
        "another run of the job has begun generation 2, so generation 1 no longer writes"
        in draining(late)["last_error"]
    )
    assert not [name for name in place.names() if name.startswith("step-")]
