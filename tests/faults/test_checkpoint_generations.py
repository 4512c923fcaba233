"""Writers that do not know that they are too late: they change nothing that others restore."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest
from durable_place import folder_of, harmed
from served import JOB, SECRET
from small_job import MEMORY, PEER, SmallJob, relaunched, trained

from hyperpod_ext.errors import StaleGenerationError
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
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
    assert "generation 2 of another run has followed generation 1" in draining(late)["last_error"]
    assert not [name for name in place.names() if name.startswith("step-")]


def test_an_older_generation_is_refused_in_memory(make_job):
    job = trained(make_job(MEMORY, nodes=1), 3)
    zombie = job.ranks.pop(0)
    job.begin_trainers()
    assert job.resume() == 3
    zombie.checkpointer._client = MemoryClient(str(job.servers[0].path))
    zombie.make_step(4)
    zombie.commit(4)
    with pytest.raises(StaleGenerationError, match="rank 0 of generation 1 may not write step 4"):
        zombie.checkpointer.flush()
    assert job.servers[0].held_steps(0)[-1] == 3
    job.train(5)
    assert job.resume() == 5
    job.assert_holds(5)


def test_an_older_generation_is_refused_at_the_peer(make_job):
    """A node that was cut off has not heard of the new generation; its peer has."""
    job = trained(make_job(MEMORY, PEER, nodes=2), 3)
    job.servers[1].ask("fence", generation=2, step=3, run="another run")
    rank = job.ranks[0]
    rank.make_step(4)
    rank.commit(4)
    rank.checkpointer.flush()
    assert job.servers[0].ask("wait_idle", timeout_s=30.0)["idle"]
    told = next(one for one in job.servers[0].ask("status")["copying"] if one["tier"] == "peer")
    assert "rank 0 of generation 1 may not write step 4: the job is at generation 2" in told["last_error"]
    replicas = [one["step"] for one in job.servers[1].ask("held")["snapshots"] if one["replica"]]
    assert max(replicas) == 3


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_of_many_that_write_one_manifest_one_does_and_it_is_whole(make_job, place):
    """Any node may commit, and several may find at once that all are done."""
    job = trained(make_job(MEMORY, place.tier()), 2)
    here = checkpoints(job)
    folder = folder_of(place, 2)
    manifest = here.read(here.found()[0])
    ranks = {int(rank): one for rank, one in manifest["ranks"].items()}
    files = {int(rank): name for rank, name in manifest["files"].items()}
    place.delete(f"{folder}/manifest.json")
    created: list[bool] = []
    start = threading.Barrier(6)

    def commit() -> None:
        start.wait()
        created.append(here.commit(folder, ranks, files, manifest["macs"]))

    threads = [threading.Thread(target=commit) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False] * 5 + [True]
    job = relaunched(make_job, job)
    assert job.resume() == 2
    job.assert_holds(2)
