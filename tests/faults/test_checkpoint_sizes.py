"""Shards restored by another number of ranks, from every tier: put together again, they are what was saved."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from durable_place import flip, folder_of, harmed
from small_job import MEMORY, PEER, SmallJob, relaunched, replaced, trained

from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient

PLACES = ["file", pytest.param("s3", marks=pytest.mark.thorough)]
"""Both stores keep one contract, tests/runtime/storage/test_tier_contract.py."""


def resized(job: SmallJob, nodes: int, workers: int) -> SmallJob:
    """The same servers, with other trainers; nodes that are new get a server of their own."""
    job.end_trainers()
    job.nodes, job.workers = nodes, workers
    if missing := set(range(nodes)) - set(job.servers):
        for node in missing:
            job.start_node(node)
        job.meet()
    return job


@pytest.mark.parametrize("kind", ["sharded", "same"])
def test_four_ranks_then_two_then_three_from_memory_and_from_peers(make_job, kind):
    """The servers outlive the trainers. A rank reads what its node does not hold from the nodes that do."""
    job = trained(make_job(MEMORY, PEER, nodes=2, workers=2, kind=kind), 4)
    assert resized(job, 2, 1).resume() == 4
    job.assert_holds(4)
    job.train(6)
    assert resized(job, 3, 1).resume() == 6
    job.assert_holds(6)
    job.train(7)
    assert job.resume() == 7
    job.assert_holds(7)


def test_copies_that_a_lost_nodes_peer_holds_are_cut_for_another_number_of_ranks(make_job):
    """Of the lost node's ranks nothing is left but those; in the end every shard comes from one."""
    job = trained(make_job(MEMORY, PEER, nodes=2, workers=2), 4)
    job.lose_node(1)
    assert resized(job, 2, 1).resume() == 4
    job.assert_holds(4)
    job.train(6)
    job.lose_node(0)
    assert resized(job, 3, 1).resume() == 6
    job.assert_holds(6)


def test_shards_of_two_replicas_are_put_together_by_another_number_of_ranks(make_job):
    """HSDP: every shard is there twice, and one of the two is enough."""
    job = trained(make_job(MEMORY, PEER, nodes=2, workers=2, kind="hybrid"), 4)
    assert resized(job, 2, 1).resume() == 4
    job.assert_holds(4)
    job.kind = "sharded"
    assert resized(job, 3, 1).resume() == 4
    job.assert_holds(4)


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("kind", ["sharded", "hybrid", "same"])
def test_four_ranks_then_two_then_three_from_a_durable_tier(make_job, place, kind):
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier(), nodes=2, workers=2, kind=kind), 4), workers=1)
    assert job.resume() == 4
    job.assert_holds(4)
    job.train(6)
    kind = "sharded" if kind == "hybrid" else kind
    job = relaunched(make_job, job, nodes=3, kind=kind)
    assert job.resume() == 6
    job.assert_holds(6)


@pytest.mark.parametrize(
    ("former", "kind"),
    [
        pytest.param("hybrid", "sharded", marks=pytest.mark.thorough),
        ("sharded", "same"),
        pytest.param("same", "sharded", marks=pytest.mark.thorough),
        pytest.param("sharded", "hybrid", marks=pytest.mark.thorough),
    ],
)
def test_as_many_ranks_with_another_sharding_go_on_from_the_newest_step(make_job, tmp_path, former, kind):
    """From memory that outlived the trainers, then from a durable tier, where an older step has the new form."""
    tier = {"kind": "file", "path": str(tmp_path / "tier"), "every_steps": 1}
    job = trained(make_job(MEMORY, PEER, tier, nodes=2, workers=2, kind=kind), 2)
    job = relaunched(make_job, job, kind=former)
    assert job.resume() == 2
    job.train(4)
    job = resized(job, 2, 2)
    job.kind = kind
    assert job.resume() == 4
    job.assert_holds(4)
    job = relaunched(make_job, job, kind=former)
    assert job.resume() == 4
    job.train(6)
    job = relaunched(make_job, job, kind=kind)
    assert job.resume() == 6
    job.assert_holds(6)


def test_a_damaged_shard_moves_a_job_of_another_size_to_the_older_step_as_a_whole(make_job, place):
    """Both ranks need something of it."""
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier(), nodes=2, workers=2), 4), workers=1)
    with harmed(place, f"{folder_of(place, 4)}/__1_0.distcp", flip(1)):
        assert job.resume() == 2
    job.assert_holds(2)


def test_of_a_durable_tier_a_rank_reads_the_images_that_it_needs_something_of(make_job, place, monkeypatch):
    """Five and three rows over four ranks: the last has none, the first of two needs the first two."""
    read: list[tuple[str, int, int]] = []
    fetch = MemoryClient.fetch

    def counted(client: MemoryClient, url: str, folder: str, rank: int, **options: Any) -> Any:
        image = fetch(client, url, folder, rank, **options)
        read.append((threading.current_thread().name, rank, len(image.image)))
        return image

    monkeypatch.setattr(MemoryClient, "fetch", counted)
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier(), nodes=2, workers=2), 4), workers=1)
    assert job.resume() == 4
    job.assert_holds(4)
    by_rank = {name: sorted(rank for its, rank, _ in read if its == name) for name, _, _ in read}
    assert sorted(by_rank.values()) == [[0, 1], [1, 2]]


def test_of_a_peers_memory_a_rank_reads_the_rows_that_it_needs(make_job, monkeypatch):
    """Two ranks a node become one: the second one needs a row of each tensor that lies on the first node."""
    came: list[tuple[int, int, int]] = []
    read_parts = PeerClient.read_parts

    def counted(peer: PeerClient, owner: int, save_id: str, parts: Sequence[Any], nbytes: int) -> None:
        read_parts(peer, owner, save_id, parts, nbytes)
        came.append((owner, sum(len(part) for _, part in parts), nbytes))

    monkeypatch.setattr(PeerClient, "read_parts", counted)
    monkeypatch.setattr(PeerClient, "read_scattered", lambda *_: pytest.fail("a whole image was read from a peer"))
    job = trained(make_job(MEMORY, nodes=2, workers=2), 4)
    assert resized(job, 2, 1).resume() == 4
    job.assert_holds(4)
    assert {owner for owner, _, _ in came} == {1}
    assert sum(nbytes for _, nbytes, _ in came) < sum(whole for _, _, whole in came) / 4
    moved = sum(event["bytes_moved"] for event in job.vote.events if event["event"] == "restored")
    assert moved == sum(nbytes for _, nbytes, _ in came)


def test_a_bit_that_flips_in_a_peers_shard_is_found_when_two_ranks_cut_what_four_have_saved(make_job):
    """Rank 0 has the shards of ranks 2 and 3 from the memory of the other node."""
    job = trained(make_job(MEMORY, nodes=2, workers=2), 4)
    job.image(1, 2, 4).flip("data")
    assert resized(job, 2, 1).resume() == 3
    job.assert_holds(3)


def test_a_shard_that_nobody_holds_any_more_moves_a_job_of_another_size_to_the_durable_step(make_job, place):
    """A node is lost and no peer has a copy: memory has but some of the shards of the newest step."""
    job = trained(make_job(MEMORY, place.tier(), nodes=2, workers=2), 5)
    replaced(job, 1)
    assert resized(job, 2, 1).resume() == 4
    job.assert_holds(4)  # what memory has of that step comes from there, the rest from the directory
