"""Nodes that keep parity of each other's snapshots: one of a group may be lost; for two there is the next tier."""

from __future__ import annotations

import pytest
from small_job import MEMORY, SmallJob, replaced, trained

from hyperpod_ext.errors import NoCheckpointError

PARITY = {"kind": "peer", "every_steps": 2, "parity": 3}


def sources(job: SmallJob) -> dict[int, str]:
    return {event["rank"]: event.get("tier") or event["source"] for event in job.vote.events}


@pytest.mark.parametrize(
    "node", [1, pytest.param(0, marks=pytest.mark.thorough), pytest.param(3, marks=pytest.mark.thorough)]
)
def test_any_one_node_of_a_group_is_rebuilt_and_the_group_is_whole_again_with_the_next_due_step(make_job, node):
    job = replaced(trained(make_job(MEMORY, PARITY, nodes=4), 5), node)
    assert job.resume() == 4
    job.assert_holds(4)
    assert sources(job) == {rank: "parity" if rank == node else "memory" for rank in range(4)}
    moved = {event["rank"]: event["bytes_moved"] for event in job.vote.events if event["event"] == "restored"}
    nbytes = {rank.number: rank.layout().plan.nbytes for rank in job.ranks.values()}
    assert moved == {rank: 3 * nbytes[rank] if rank == node else 0 for rank in range(4)}
    job.train(6)
    other = (node + 1) % 4
    replaced(job, other)
    assert job.resume() == 6
    job.assert_holds(6)
    assert [rank for rank, source in sources(job).items() if source == "parity"] == [other]
    assert job.said == []


def test_two_of_a_group_lost_take_all_to_the_next_tier_which_is_said(make_job, place):
    job = trained(make_job(MEMORY, PARITY, {**place.tier(), "every_steps": 4}, nodes=3), 7)
    replaced(job, 0, 2)
    assert job.resume(committed=7) == 4
    job.assert_holds(4)
    assert [sources(job)[rank] for rank in (0, 2)] == ["file", "file"]
    (said,) = job.said
    assert (said.event, said.fields) == ("parity_short", {"step": 6, "ranks": [0, 2], "restored_step": 4})


def test_two_of_a_group_lost_without_another_tier_is_said(make_job):
    job = trained(make_job(MEMORY, PARITY, nodes=3), 4)
    replaced(job, 0, 2)
    with pytest.raises(
        NoCheckpointError,
        match=r"No step .*Parity of step 4 can rebuild one node of a group, but the snapshots of ranks 0, 2 are",
    ):
        job.resume(committed=4)


def test_a_bit_that_flips_in_a_survivors_snapshot_is_found_before_anybody_goes_on(make_job, place):
    job = trained(make_job(MEMORY, PARITY, {**place.tier(), "every_steps": 4}, nodes=3), 7)
    replaced(job, 1)
    job.image(2, 2, 6).flip("data")
    assert job.resume(committed=7) == 4
    job.assert_holds(4)
    assert any("CRC64-NVME" in error for _, error in job.vote.errors)
