"""Half a gigabyte of state: images of many chunks, parts and pieces, and the same promises."""

from __future__ import annotations

import pytest
from durable_place import Bucket, flip, folder_of, harmed
from fault_proxy import Faults
from small_job import MEMORY, PEER, relaunched, trained

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1800)]


def test_flipped_bits_in_memory_at_a_peer_and_in_a_directory(make_job, place):
    job = trained(make_job(MEMORY, PEER, place.tier(every_steps=1), kind="huge"), 2)
    assert sum(one["nbytes"] for one in job.servers[0].ask("held")["snapshots"]) > 512 << 20
    job.image(0, 0, 2).flip("data")
    assert job.resume() == 2
    job.assert_holds(2)
    assert {event["source"] for event in job.vote.events if event["rank"] == 0} == {"peer"}
    job.image(1, 0, 2, replica=True).flip("last byte")
    assert job.resume() == 2
    job.assert_holds(2)
    assert {event["tier"] for event in job.vote.events if event["rank"] == 0} == {"file"}
    plan = job.ranks[1].layout().plan
    job = relaunched(make_job, job, workers=1)
    for at in (0, plan.nbytes // 2, plan.nbytes - 1):
        with harmed(place, f"{folder_of(place, 2)}/__1_0.distcp", flip(at)):
            assert job.resume() == 1
    assert job.resume() == 2
    job.assert_holds(2)


def test_uploads_in_parts_that_are_cut_and_a_bit_that_flips_in_s3(make_job, proxy):
    bucket = Bucket(proxy.upstream)
    proxy.order(Faults(only="^PUT .*distcp", cut_upload_after=3_000_000, times=6))
    job = trained(make_job(MEMORY, bucket.tier(every_steps=1), kind="huge"), 2)
    assert sum(seen.struck for seen in proxy.seen) == 6
    proxy.order(Faults())
    name = f"{folder_of(bucket, 2)}/__0_0.distcp"
    job = relaunched(make_job, job)
    with harmed(bucket, name, flip(len(bucket.read(name)) // 3)):
        assert job.resume() == 1
        job.assert_holds(1)
    assert job.resume() == 2
    job.assert_holds(2)
