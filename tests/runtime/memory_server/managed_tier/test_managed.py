"""Our client of AWS's managed tier, against our own server of it, and against servers that misbehave."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from serving import serving

from hyperpod_ext.errors import (
    ConflictError,
    CorruptSnapshotError,
    HyperpodExtError,
    MemoryTierFullError,
    NotFoundError,
    UnreachableError,
)
from hyperpod_ext.runtime.memory_server.managed_tier import shard_meta
from hyperpod_ext.runtime.memory_server.managed_tier.api import ApiServer
from hyperpod_ext.runtime.memory_server.managed_tier.blobs import Blobs
from hyperpod_ext.runtime.memory_server.managed_tier.tier import PIECE, ManagedTier

MIB = 1 << 20


@pytest.fixture
def url() -> Iterator[str]:
    """A server with a budget of 12 MiB."""
    blobs = Blobs(budget=12 * MIB, usable_bytes=lambda: 100 * MIB)
    made = ApiServer("127.0.0.1", 0, blobs, lambda _: False)
    with serving(made):
        yield f"http://127.0.0.1:{made.server_address[1]}"


@pytest.fixture
def tier(url: str) -> ManagedTier:
    tier = ManagedTier(url, "job", world_size=2, steps_retained=2)
    tier.create()
    return tier


@contextmanager
def answering(*pieces: bytes) -> Iterator[ManagedTier]:
    """A tier whose server sends just this to each request, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"".join(pieces))

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield ManagedTier(address, "job", 2, timeout=timedelta(seconds=5))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def ok(body: bytes, *, length: int | None = None, header: str | None = None) -> bytes:
    algorithm, make = next(iter(shard_meta.algorithms().items()))
    checksum = make()
    checksum.update(body)
    header = shard_meta.encode(algorithm, checksum.digest()) if header is None else header
    size = len(body) if length is None else length
    return f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nShard-Meta: {header}\r\n\r\n".encode() + body


def test_parts_come_back_as_one_blob_with_their_meta(tier: ManagedTier) -> None:
    image = os.urandom(2 * PIECE + 5)
    floats = memoryview(bytes(80)).cast("d")
    tier.put(1, 40, [b"head", memoryview(image), floats, b""], {"save_id": "g1-s40", "größe": 5})
    data, meta = tier.get(1, 40)
    assert bytes(data) == b"head" + image + bytes(80)
    assert meta == {"save_id": "g1-s40", "größe": 5}


def test_a_blob_is_received_into_the_buffer_it_is_for(tier: ManagedTier) -> None:
    tier.put(0, 1, [b"0123456789"])
    buffer = bytearray(b"." * 16)
    data, _ = tier.get(0, 1, memoryview(buffer))
    assert buffer == b"0123456789......"
    assert data.obj is buffer
    with pytest.raises(ValueError, match="the blob has 10 bytes, but the buffer only 4"):
        tier.get(0, 1, memoryview(bytearray(4)))


def test_an_empty_blob_is_one_too(tier: ManagedTier) -> None:
    tier.put(0, 1, [])
    assert bytes(tier.get(0, 1)[0]) == b""


def test_steps_are_listed_newest_first_and_deleted(tier: ManagedTier) -> None:
    for step in (10, 30, 20):
        tier.put(0, step, [b"x"])
    assert tier.latest() == [30, 20]
    tier.delete(0, 30)
    tier.delete(0, 30)
    assert tier.latest() == [20]
    with pytest.raises(NotFoundError, match="rank 0 has no step 30"):
        tier.get(0, 30)


def test_a_namespace_is_found_again_if_it_is_the_same(url: str, tier: ManagedTier) -> None:
    tier.create()
    ManagedTier(url, "job", 2, 2).create()
    with pytest.raises(ConflictError, match="'num_ranks': 2"):
        ManagedTier(url, "job", 3, 2).create()


def test_without_its_namespace_there_is_nothing_and_nothing_is_stored(url: str) -> None:
    stranger = ManagedTier(url, "another", 2)
    assert stranger.latest() == []
    with pytest.raises(NotFoundError, match="no namespace 'another'"):
        stranger.put(0, 1, [b"x"])


def test_no_room_is_told_as_such_and_harms_nothing(tier: ManagedTier) -> None:
    tier.put(0, 1, [b"kept"])
    with pytest.raises(MemoryTierFullError, match="no room"):
        tier.put(1, 1, [bytes(20 * MIB)])
    assert bytes(tier.get(0, 1)[0]) == b"kept"


def test_a_server_that_refuses_and_closes_at_once_is_heard() -> None:
    refusal = b"HTTP/1.1 507 Full\r\nContent-Length: 4\r\n\r\nfull"
    with answering(refusal) as tier, pytest.raises(MemoryTierFullError, match="answers 507: full"):
        tier.put(0, 1, [bytes(16 * MIB)])


def test_meta_has_bounds(tier: ManagedTier) -> None:
    with pytest.raises(ValueError, match="put it into the blob"):
        tier.put(0, 1, [b"x"], {"too": "x" * 20_000})


def test_a_flipped_bit_is_found() -> None:
    good = ok(b"data" * 100)
    with (
        answering(good[:-1] + bytes([good[-1] ^ 1])) as tier,
        pytest.raises(CorruptSnapshotError, match="rank 0's step 1"),
    ):
        tier.get(0, 1)


def test_an_answer_that_ends_early_is_an_error() -> None:
    with answering(ok(b"data", length=5)) as tier, pytest.raises(UnreachableError, match="ended after 4 of 5 bytes"):
        tier.get(0, 1)
    with answering(b"HTTP/1.1 200 OK\r\nContent-Le") as tier, pytest.raises(HyperpodExtError):
        tier.get(0, 1)
    with answering() as tier, pytest.raises(UnreachableError, match="without response"):
        tier.get(0, 1)


@pytest.mark.parametrize("header", ["", "nonsense", "{}", '{"checksum": 5}', '["checksum"]', '{"checksum": "AAAA"}'])
def test_a_blob_without_a_checksum_is_not_trusted(header: str) -> None:
    with answering(ok(b"data", header=header)) as tier, pytest.raises(HyperpodExtError):
        tier.get(0, 1)


def test_a_checksum_unknown_here_is_not_passed_over() -> None:
    header = json.dumps({"checksum": "AAAA", "algorithm": "later"})
    with answering(ok(b"data", header=header)) as tier, pytest.raises(HyperpodExtError, match="'later'"):
        tier.get(0, 1)


@pytest.mark.parametrize("into", [None, lambda: memoryview(bytearray(20))])
def test_a_chunked_answer_is_read_too(into: Callable[[], memoryview] | None) -> None:
    head = ok(b"data").replace(b"Content-Length: 4", b"Transfer-Encoding: chunked").removesuffix(b"data")
    with answering(head + b"2\r\nda\r\n2\r\nta\r\n0\r\n\r\n") as tier:
        assert bytes(tier.get(0, 1, into and into())[0]) == b"data"
    with answering(head + b"2\r\nda\r\n2\r\nt") as tier, pytest.raises(UnreachableError):
        tier.get(0, 1, into and into())


@pytest.mark.parametrize("body", [b"{}", b'["1"]', b"[true]", b"[1.5]", b"nothing", b""])
def test_steps_that_are_no_steps_are_an_error(body: bytes) -> None:
    with answering(ok(body)) as tier, pytest.raises(UnreachableError, match="instead of a list of steps"):
        tier.latest()


def test_nobody_there_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"the managed tier at 127.0.0.1:{port}: .*refused"):
        ManagedTier(f"http://127.0.0.1:{port}", "job", 2).create()


def test_other_addresses_are_refused() -> None:
    with pytest.raises(ValueError, match="is not http://HOST:PORT"):
        ManagedTier("https://host:9200", "job", 2)
