"""S3 that throttles, cuts connections and flips bits on the way: drained and restored all the same, or refused."""

from __future__ import annotations

import pytest
from durable_place import Bucket
from fault_proxy import FaultProxy, Faults
from small_job import MEMORY, relaunched, trained

from hyperpod_ext.errors import NoCheckpointError

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(proxy: FaultProxy) -> Bucket:
    return Bucket(proxy.upstream)


WEATHER = {
    "throttled": Faults(status=503, chance=0.3, seed=3),
    "refused": Faults(refuse=True, chance=0.3, seed=3),
    "uploads cut": Faults(only="^PUT .*distcp", cut_upload_after=1000, times=4),
    "answers cut": Faults(only="^GET", cut_answer_after=500, chance=0.3, seed=4),
    "answers lost": Faults(only="^PUT", cut_answer_after=0, times=4),
}


@pytest.mark.parametrize(
    "weather",
    # each alone meets the store in tests/runtime/storage/test_s3_under_faults.py
    [pytest.param(one, marks=() if one in ("throttled", "uploads cut") else pytest.mark.thorough) for one in WEATHER],
)
def test_what_is_drained_and_restored_in_bad_weather_is_whole(make_job, proxy, bucket, weather):
    proxy.order(WEATHER[weather])
    job = trained(make_job(MEMORY, bucket.tier()), 4)
    struck = any(seen.struck for seen in proxy.seen)
    job = relaunched(make_job, job)
    assert job.resume() == 4
    job.assert_holds(4)
    assert struck or any(seen.struck for seen in proxy.seen)
    proxy.order(Faults())
    assert [one for one in bucket.names() if one.endswith("4-g000001/manifest.json")]


def test_a_bit_that_flips_on_the_way_in_moves_all_ranks_to_the_older_step(make_job, proxy, bucket):
    job = relaunched(make_job, trained(make_job(MEMORY, bucket.tier()), 4))
    proxy.order(Faults(only="^GET .*step-000000004.*/__1_0.distcp", flip_at=700))
    assert job.resume() == 2
    job.assert_holds(2)


def test_an_image_that_cannot_be_had_moves_all_ranks_to_the_older_step(make_job, proxy, bucket):
    job = relaunched(make_job, trained(make_job(MEMORY, bucket.tier()), 4))
    proxy.order(Faults(only="^GET .*step-000000004.*/__1_0.distcp", status=403, code="AccessDenied"))
    assert job.resume() == 2
    job.assert_holds(2)


@pytest.mark.parametrize(
    ("code", "words"),
    [("AccessDenied", "Allow this role s3:ListBucket"), ("RequestTimeTooSkewed", "check this machine's clock")],
    ids=["denied", "the clock has jumped"],
)
def test_a_bucket_that_denies_is_said_and_nothing_is_begun_anew(make_job, proxy, bucket, code, words):
    job = relaunched(make_job, trained(make_job(MEMORY, bucket.tier()), 2))
    proxy.order(Faults(status=403, code=code))
    with pytest.raises(NoCheckpointError, match=rf"Not readable: .*{code}.*{words}"):
        job.resume()
    proxy.order(Faults())
    assert job.resume() == 2
    job.assert_holds(2)


def test_a_drain_that_is_denied_costs_no_step_in_memory(make_job, proxy, bucket):
    job = trained(make_job(MEMORY, bucket.tier()), 2)
    proxy.order(Faults(only="^(PUT|POST)", status=403, code="AccessDenied"))
    job.train(4)
    told = job.servers[0].ask("status")["copying"][0]
    assert (told["failed"] > 0, told["durable_step"]) == (True, 2)
    assert "AccessDenied" in told["last_error"]
    assert job.resume() == 4
    job.assert_holds(4)
    proxy.order(Faults())
    job.train(6)
    assert job.servers[0].ask("status")["copying"][0]["durable_step"] == 6
