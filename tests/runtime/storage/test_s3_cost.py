"""CPU beside boto3's own way of an upload, with its MAC, into a sink; and of a restore beside reads without a MAC."""

from __future__ import annotations

import io
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import s3_server
from awscrt import checksums
from sink import running_sink

from hyperpod_ext.runtime.memory_server.slots.region import Region
from hyperpod_ext.runtime.storage.mac import Expected, mac_of
from hyperpod_ext.runtime.storage.object_store import MIB, ObjectStore
from hyperpod_ext.runtime.storage.open import open_store

SECRET = b"0123456789abcdef"


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
        ours = cpu_s(lambda: _bring(store, memoryview(data), crc))
        theirs = cpu_s(lambda: client.upload_fileobj(io.BytesIO(data), "bucket", "blob"))
    assert ours < 0.25 * theirs, f"{ours:.3f} s of CPU beside {theirs:.3f} s"
    print(f"{ours:.3f} s of CPU beside {theirs:.3f} s")


def _bring(store: ObjectStore, data: memoryview, crc: str) -> None:
    """As a drain does."""
    mac_of(SECRET, data)
    store.put("blob", data, crc)


@pytest.mark.slow
@pytest.mark.measures
def test_a_restore_costs_half_as_much_again_as_reading_and_checksumming(tmp_path: Path) -> None:
    """From a directory in the page cache, where reading costs least, into new memory, as memory servers do."""
    data = memoryview(bytes(256 * MIB))
    crc = f"{checksums.crc64nvme(data):016x}"
    store = open_store(str(tmp_path))
    store.put("blob", data, crc)
    file = Expected("blob", len(data), crc, mac_of(SECRET, data))

    def restore(check: Callable[[memoryview], None]) -> None:
        region = Region("restored", len(data), 1)
        with region.view(0, len(data)) as into:
            store.read_into("blob", into)
            check(into)
            checksums.crc64nvme(into)
        region.close()

    least = cpu_s(lambda: restore(lambda into: None))
    ours = cpu_s(lambda: restore(lambda into: file.check(into, SECRET, "blob")))
    print(f"{ours:.3f} s of CPU beside {least:.3f} s")
    assert ours < 1.5 * least, f"{ours:.3f} s of CPU beside {least:.3f} s"
