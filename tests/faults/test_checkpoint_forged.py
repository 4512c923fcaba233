"""Somebody can write to the bucket, and has not the job's secret: what they put there is never loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from durable_place import Directory, Place, folder_of, harmed
from forged import other_weights, plan_of
from served import JOB, SECRET
from small_job import MEMORY, relaunched, trained

from hyperpod_ext.runtime.snapshot.manifest import sign
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.file import FileStore

PLACES = ["file", pytest.param("s3", marks=pytest.mark.thorough)]
"""Both stores keep one contract, tests/runtime/storage/test_tier_contract.py."""


def rewrite(place: Place, step: int, change: Callable[[dict[str, Any]], None], secret: bytes | None = None) -> None:
    """The manifest of a step changed; signed again by who has the secret."""
    name = f"{folder_of(place, step)}/manifest.json"
    manifest = json.loads(place.read(name))
    change(manifest)
    place.write(name, json.dumps(manifest if secret is None else sign(manifest, secret)).encode())


def without_macs(manifest: dict[str, Any]) -> None:
    del manifest["macs"]


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("workers", [1, 2], ids=["as many ranks", "half as many"])
def test_a_forged_shard_with_the_right_crc_moves_all_ranks_to_the_older_step(make_job, place, workers):
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier(), workers=workers), 4), workers=1)
    name = f"{folder_of(place, 4)}/__1_0.distcp"
    with harmed(place, name, other_weights(plan_of(place, 4, 1))):
        assert job.resume() == 2
    job.assert_holds(2)
    assert name in job.vote.errors[0][1]
    assert "its CRC64-NVME is right, but not its MAC: somebody has changed it" in job.vote.errors[0][1]
    job = relaunched(make_job, job)
    assert job.resume() == 4  # it was whole but for that
    job.assert_holds(4)


def test_shards_in_each_others_place_and_of_another_step_are_not_loaded(make_job, place):
    """Written by the job itself, with the lengths that are expected."""
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier()), 4))
    name, others = f"{folder_of(place, 4)}/__1_0.distcp", ("4/__0_0.distcp", "2/__1_0.distcp")
    for other in others:
        step, _, file = other.partition("/")
        shard = place.read(f"{folder_of(place, int(step))}/{file}")
        with harmed(place, name, lambda data, shard=shard: shard[: len(data)].ljust(len(data), b"\0")):
            assert job.resume() == 2, other
            job.assert_holds(2)


@pytest.mark.parametrize("what", ["claim", "snapshot"])
def test_what_else_the_job_has_signed_is_no_manifest(make_job, place, what):
    job = trained(make_job(MEMORY, place.tier()), 4)
    name = f"{folder_of(place, 4)}/manifest.json"
    snapshot = json.dumps(json.loads(place.read(name))["ranks"]["0"]).encode()
    claim = place.read("generations/000001.json")
    job = relaunched(make_job, job)
    with harmed(place, name, lambda data: claim if what == "claim" else snapshot):
        assert job.resume() == 2
    job.assert_holds(2)


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_checkpoint_of_an_earlier_version_is_restored_with_a_warning(make_job, place):
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier()), 4))
    rewrite(place, 4, without_macs, SECRET)
    with pytest.warns(RuntimeWarning, match=r"000004-g000001: an earlier version .*no MAC of its files") as told:
        assert job.resume() == 4
    assert len([one for one in told if "no MAC" in str(one.message)]) == len(job.ranks)
    job.assert_holds(4)
    assert [event["unbound"] for event in job.vote.events if event["event"] == "restored"] == [True, True]
    job.train(6)
    job = relaunched(make_job, job)
    assert job.resume() == 6
    assert not any("unbound" in event for event in job.vote.events)


def test_another_nodes_word_for_its_part_is_believed_only_if_it_is_signed(tmp_path):
    """Nodes tell each other through the bucket whether they are done, and the MACs of what they brought."""
    place = Directory(tmp_path)
    checkpoints = Checkpoints(FileStore(place.root), job=JOB, secret=SECRET)
    macs = {"__1_0.distcp": checkpoints.mac(memoryview(b"what node 1 brought"))}
    checkpoints.put_done("step-000000004-g000001", 1, macs)
    checkpoints.put_done("step-000000002-g000001", 1, macs)
    name = "step-000000004-g000001/done-1.json"
    assert checkpoints.macs("step-000000004-g000001", 1) == macs
    forged = json.loads(place.read(name))
    forged["macs"]["__1_0.distcp"] = Checkpoints(checkpoints.store, job=JOB, secret=b"x" * 32).mac(memoryview(b"x"))
    for said in (b"{}", b"", json.dumps(forged).encode(), place.read("step-000000002-g000001/done-1.json")):
        with (
            harmed(place, name, lambda data, said=said: said),
            pytest.raises(Exception, match=r"done-1\.json") as error,
        ):
            checkpoints.macs("step-000000004-g000001", 1)
        assert type(error.value).__name__ == "CorruptSnapshotError"
