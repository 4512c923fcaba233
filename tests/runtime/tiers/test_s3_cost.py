"""What an upload costs the machine that trains: the client's CPU beside boto3's own way, into a sink."""

from __future__ import annotations

import io
import resource
from collections.abc import Callable

import pytest
import s3_server
from awscrt import checksums
from sink import running_sink

from hyperpod_ext.runtime.tiers.object_store import MIB, open_store


def cpu_s(work: Callable[[], None]) -> float:
    """The least of three runs; the first run of anything also imports and connects."""
    found = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF)
        work()
        after = resource.getrusage(resource.RUSAGE_SELF)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found[1:])


@pytest.mark.measures
def test_an_upload_costs_a_quarter_of_the_cpu_of_upload_fileobj(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(256 * MIB)
    crc = f"{checksums.crc64nvme(data):016x}"
    with running_sink() as url:
        for name, value in {**s3_server.CREDENTIALS, "AWS_ENDPOINT_URL_S3": url}.items():
            monkeypatch.setenv(name, value)
        store, client = open_store("s3://bucket/job"), s3_server.client(url)
        ours = cpu_s(lambda: store.put("blob", memoryview(data), crc))
        theirs = cpu_s(lambda: client.upload_fileobj(io.BytesIO(data), "bucket", "blob"))
    assert ours < 0.25 * theirs, f"{ours:.3f} s of CPU beside {theirs:.3f} s"
    print(f"{ours:.3f} s of CPU beside {theirs:.3f} s")
