"""The S3 store through a proxy that throttles, cuts and spoils: right in the end, or a clear error."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import s3_server
from awscrt import checksums
from fault_proxy import FaultProxy, Faults

from hyperpod_ext.errors import NotFoundError, UnreachableError
from hyperpod_ext.runtime.storage import s3_requests
from hyperpod_ext.runtime.storage.object_store import MIB, Cancelled, ObjectStore
from hyperpod_ext.runtime.storage.open import open_store

pytestmark = pytest.mark.slow

DATA = os.urandom(23 * MIB + 17)
PARTS = 5
CRC = f"{checksums.crc64nvme(DATA):016x}"
PART = r"^PUT .*partNumber="


def in_words(faults: Faults) -> str:
    return " ".join(f"{name} {value}" for name, value in vars(faults).items() if value != getattr(Faults(), name))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other a tenth as far apart."""
    monkeypatch.setattr(s3_requests, "_FIRST_WAIT_S", 0.02)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint()) as proxy:
        for name, value in {**s3_server.CREDENTIALS, "AWS_ENDPOINT_URL_S3": proxy.url}.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def bucket() -> str:
    return s3_server.new_bucket(s3_server.endpoint())


@pytest.fixture
def store(proxy: FaultProxy, bucket: str) -> ObjectStore:
    return make(bucket)


def make(bucket: str, deadline_s: float = 30.0, streams: int = 4) -> ObjectStore:
    return open_store(f"s3://{bucket}/job", deadline_s=deadline_s, part_bytes=5 * MIB, streams=streams)


def put(store: ObjectStore) -> int:
    """Put `DATA`; the bytes that `on_bytes` made of it."""
    counted: list[int] = []
    store.put("blob", memoryview(DATA), CRC, on_bytes=counted.append)
    return sum(counted)


def stored(bucket: str) -> bytes:
    return bytes(s3_server.client(s3_server.endpoint()).get_object(Bucket=bucket, Key="job/blob")["Body"].read())


def unfinished(bucket: str) -> int:
    return len(s3_server.client(s3_server.endpoint()).list_multipart_uploads(Bucket=bucket).get("Uploads", []))


@pytest.mark.parametrize(
    "faults",
    [
        Faults(status=503, chance=0.4, seed=1, times=12),
        Faults(status=500, code="InternalError", chance=0.4, seed=2, times=12),
        Faults(only="^POST", status=503, times=4),
        Faults(only=PART, cut_upload_after=2 * MIB, times=3),
        Faults(only=PART, cut_upload_after=0, times=3),
        Faults(only=PART, cut_answer_after=0, times=3),
        Faults(refuse=True, times=4),
        Faults(only="^POST .*uploadId=", cut_answer_after=0, times=1),
    ],
    ids=in_words,
)
def test_an_upload_through_faults_ends_right(
    proxy: FaultProxy, bucket: str, store: ObjectStore, faults: Faults
) -> None:
    proxy.order(faults)
    assert put(store) == len(DATA)
    assert any(seen.struck for seen in proxy.seen), "the fault did not strike"
    assert stored(bucket) == DATA
    assert unfinished(bucket) == 0


@pytest.mark.parametrize(
    "faults",
    [
        Faults(status=503, chance=0.5, seed=3, times=8),
        Faults(cut_answer_after=MIB + 5, times=6),
        Faults(cut_answer_after=0, times=3),
        Faults(refuse=True, times=4),
    ],
    ids=in_words,
)
def test_a_download_through_faults_ends_right(proxy: FaultProxy, store: ObjectStore, faults: Faults) -> None:
    put(store)
    proxy.order(faults)
    into, counted = bytearray(len(DATA)), []  # type: ignore[var-annotated]
    store.read_into("blob", memoryview(into), on_bytes=counted.append)
    assert any(seen.struck for seen in proxy.seen), "the fault did not strike"
    assert into == DATA
    assert sum(counted) == len(DATA)


def test_a_cut_download_goes_on_where_it_was_cut(proxy: FaultProxy, bucket: str) -> None:
    store = make(bucket, streams=1)
    put(store)
    proxy.order(Faults(only="^GET", cut_answer_after=4 * MIB, times=1))
    into = bytearray(5 * MIB)
    store.read_into("blob", memoryview(into))
    assert into == DATA[: 5 * MIB]
    assert proxy.count("^GET") == 2


def test_a_flipped_bit_in_a_small_blob_is_read_again(proxy: FaultProxy, store: ObjectStore) -> None:
    store.put_new("manifest", b"x" * 5000)
    proxy.order(Faults(only="^GET", flip_at=4321, times=2))
    assert store.get("manifest") == b"x" * 5000
    assert proxy.count("^GET") == 3


def test_only_the_parts_that_failed_are_sent_again(proxy: FaultProxy, bucket: str, store: ObjectStore) -> None:
    proxy.order(Faults(only=r"partNumber=(2|4)\b", cut_upload_after=MIB, times=2))
    put(store)
    assert proxy.count(PART) == PARTS + 2
    assert proxy.count(r"partNumber=1\b") == 1
    assert stored(bucket) == DATA


def test_a_put_after_one_that_gave_up_sends_only_what_is_missing(proxy: FaultProxy, bucket: str) -> None:
    store = make(bucket, deadline_s=1.0, streams=1)
    proxy.order(Faults(only=r"partNumber=4\b", status=503))
    with pytest.raises(UnreachableError, match="tried for 1 s"):
        put(store)
    assert unfinished(bucket) == 1
    assert proxy.count("^POST .*uploads") == 1
    proxy.order(Faults())
    assert put(store) == len(DATA)
    assert proxy.count("^POST .*uploads") == 0
    assert proxy.count(PART) == 2  # of five, the fourth and the one that was never begun
    assert stored(bucket) == DATA
    assert unfinished(bucket) == 0


@pytest.mark.parametrize("how", ["close", "delete", "other bytes"])
def test_what_a_failed_put_left_is_taken_back(proxy: FaultProxy, bucket: str, how: str) -> None:
    store = make(bucket, deadline_s=0.5)
    proxy.order(Faults(only=r"partNumber=4\b", status=503))
    with pytest.raises(UnreachableError):
        put(store)
    proxy.order(Faults())
    if how == "close":
        store.close()
    elif how == "delete":
        store.delete(["blob"])
    else:
        store.put("blob", memoryview(b"other"), f"{checksums.crc64nvme(b'other'):016x}")
    assert unfinished(bucket) == 0


def test_a_put_stops_soon_after_it_is_cancelled_even_while_it_waits(proxy: FaultProxy, bucket: str) -> None:
    store = make(bucket)
    proxy.order(Faults(only=PART, status=503))
    with pytest.raises(Cancelled):
        store.put("blob", memoryview(DATA), CRC, cancelled=lambda: proxy.count(PART) > 2)
    proxy.order(Faults())
    assert unfinished(bucket) == 0
    assert store.list() == []


@pytest.mark.parametrize("call", ["put_new", "get", "list", "delete"])
def test_small_calls_stop_soon_after_they_are_cancelled_though_the_place_cannot_be_reached(
    proxy: FaultProxy, store: ObjectStore, call: str
) -> None:
    proxy.order(Faults(refuse=True))
    began = time.monotonic()
    arguments = {"put_new": ("blob", b"new"), "get": ("blob",), "list": (), "delete": (["blob"],)}[call]
    with pytest.raises(Cancelled):
        getattr(store, call)(*arguments, cancelled=lambda: time.monotonic() - began > 0.1)


@pytest.mark.parametrize("faults", [Faults(cut_answer_after=0, times=1), Faults(status=503, times=2)], ids=in_words)
def test_a_create_only_put_knows_its_own_blob_again(proxy: FaultProxy, store: ObjectStore, faults: Faults) -> None:
    faults.only = "^PUT"
    proxy.order(faults)
    assert store.put_new("manifest", b"mine")
    assert not store.put_new("manifest", b"another's")
    proxy.order(Faults(only="^PUT", cut_answer_after=0, times=1))
    assert not store.put_new("manifest", b"another's")


def test_a_delete_that_is_throttled_is_done_in_the_end(proxy: FaultProxy, store: ObjectStore) -> None:
    store.put_new("a", b"1")
    proxy.order(Faults(status=503, times=2))
    store.delete(["a"])
    assert store.list() == []


class TestClearErrors:
    def test_no_bucket(self, proxy: FaultProxy) -> None:
        store = open_store("s3://no-such-bucket-at-all/job")
        for use in (store.check, lambda: store.get("x"), lambda: put(store)):
            with pytest.raises(UnreachableError, match="no-such-bucket-at-all") as caught:
                use()
            assert "Create bucket" in caught.value.hint
            assert "botocore" not in str(caught.getrepr(style="long")), "the client's traceback reaches the caller"

    def test_access_denied(self, proxy: FaultProxy, bucket: str, store: ObjectStore) -> None:
        proxy.order(Faults(only="^PUT", status=403, code="AccessDenied"))
        with pytest.raises(UnreachableError, match=f"Cannot write s3://{bucket}/job/.*AccessDenied") as caught:
            store.check()
        assert "s3:PutObject" in caught.value.hint
        with pytest.raises(UnreachableError):
            put(store)
        lines = [seen.line for seen in proxy.seen]
        assert len(set(lines)) == len(lines), "what cannot pass is not tried again"

    def test_wrong_keys(self, proxy: FaultProxy, store: ObjectStore) -> None:
        proxy.order(Faults(status=403, code="SignatureDoesNotMatch"))
        with pytest.raises(UnreachableError, match="SignatureDoesNotMatch") as caught:
            store.check()
        assert "credentials" in caught.value.hint

    def test_endpoint_down(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {**s3_server.CREDENTIALS, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}.items():
            monkeypatch.setenv(name, value)
        store = open_store("s3://bucket/job", deadline_s=1.0)
        with pytest.raises(UnreachableError, match=r"http://127.0.0.1:9.*tried for 1 s") as caught:
            store.check()
        assert "AWS_ENDPOINT_URL_S3" in caught.value.hint
        with pytest.raises(UnreachableError):
            put(store)

    def test_nothing_there_is_not_retried(self, proxy: FaultProxy, store: ObjectStore) -> None:
        proxy.order(Faults())
        with pytest.raises(NotFoundError):
            store.get("x")
        assert len(proxy.seen) == 1
