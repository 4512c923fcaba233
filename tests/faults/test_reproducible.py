"""In-place resizes of a job with reproducible=True: each loss and the weights are those of one rank that nobody
disturbed. Meanwhile the job writes checkpoints to S3, and reads none: an HTTP proxy before it counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from durable_place import Bucket
from fault_proxy import FaultProxy
from resizing import BITWISE, Resizable, assert_bitwise, run_alone, settings
from s3_server import CREDENTIALS

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]

NOTES = re.compile(
    r"^GET /[^/]+(/\?|\?|.*/(generations/\d+|(node|done|failed|left)-\d+|plan-[0-9a-f]+|manifest)\.json)"
)
"""What writers read: listings, and what nodes tell each other of a checkpoint that is on its way, layouts included."""


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Between jobs and S3."""
    with FaultProxy(Bucket().url) as proxy:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "hsdp"])
def test_two_four_three_one_four_is_bitwise_one_rank_and_reads_no_storage(
    job: Any, storage: FaultProxy, parallel: str
) -> None:
    env = {"HPX_TEST_STEPS": "140", "HPX_TEST_SECONDS": "0", "HPX_TEST_PARALLEL": parallel}
    known = {"workers_per_node": 1, "script": BITWISE}
    alone = run_alone(job("alone", nodes=1, env=env, settings=settings(), **known))
    bucket = Bucket(storage.url, job="tiny")
    tiers = [{"kind": "memory"}, bucket.tier(every_steps=10)]
    resized = job(
        "resized",
        nodes=2,
        env=env | {"HPX_TEST_SECONDS": "1"},
        settings=settings(checkpoint={"tiers": tiers}),
        **known,
    )
    running = Resizable(resized).start()
    running.job.until("step", step=3)
    assert storage.count("^GET") > 0, "it was looked whether there is a checkpoint to begin with"
    storage.seen.clear()
    for nodes in (4, 3, 1, 4):
        resize = running.resize(nodes)
        assert (resize["nodes"], resize["pids_kept"]) == (nodes, True)
    report = running.finish()
    assert_bitwise(running, report, alone)
    assert storage.count(r"^PUT .*\.distcp") > 0
    assert not [seen.line for seen in [*storage.seen] if seen.line.startswith("GET") and not NOTES.match(seen.line)]
    bucket.read(next(name for name in bucket.names() if name.endswith(".distcp")))
    assert storage.count(r"^GET .*\.distcp") == 1, "a read is counted"
