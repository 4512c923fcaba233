"""Frames, handshakes, and the store that process groups meet in."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from hyperpod_ext.runtime import wire
from hyperpod_ext.runtime.rendezvous.kv import KeyValueServer
from hyperpod_ext.runtime.rendezvous.store import GenerationOverError, PartitionedStore, owner_of

SECRET = b"0123456789abcdef"


class Servers:
    """Two nodes' key-value servers, in an event loop of their own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.errors: list[str] = []
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.nodes = [self.run(self._start()) for _ in range(2)]

    async def _start(self) -> tuple[KeyValueServer, tuple[str, int]]:
        server = KeyValueServer(SECRET, self.errors.append)
        return server, ("127.0.0.1", await server.start("127.0.0.1"))

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def store(self, generation: int = 1, secret: bytes = SECRET) -> PartitionedStore:
        """Ranks 0 and 1 are on the first node, 2 and 3 on the second."""
        first, second = (address for _, address in self.nodes)
        return PartitionedStore([first, first, second, second], generation, secret)

    def enter(self, generation: int) -> None:
        for server, _ in self.nodes:
            self.run(server.enter(generation))

    def stop(self) -> None:
        for server, _ in self.nodes:
            self.run(server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    found = Servers()
    yield found
    found.stop()
    assert found.errors == []


def test_what_one_rank_sets_another_gets(servers):
    servers.store().set("0//cpu//0/2", b"\x00address\xff")
    assert servers.store().get("0//cpu//0/2") == b"\x00address\xff"
    assert servers.store().check(["0//cpu//0/2"])
    assert not servers.store().check(["0//cpu//0/3"])


def test_keys_live_on_the_node_of_the_rank_they_name(servers):
    store = servers.store()
    for rank in range(4):
        store.set(f"x/{rank}", b"")
    assert [server.requests for server, _ in servers.nodes] == [2, 2]
    assert owner_of("x/3", 4) == 3
    assert owner_of("x/7", 4) == owner_of("x/7", 4) < 4


def test_a_get_waits_for_the_set(servers):
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(servers.store().get("later/1")))
    waiting.start()
    servers.store().set("later/1", b"now")
    waiting.join(10)
    assert got == [b"now"]


def test_a_get_that_nobody_answers_ends_after_its_timeout(servers):
    store = servers.store()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(GenerationOverError, match="nobody set 'never/1'"):
        store.get("never/1")


def test_a_counter_counts_and_reads_as_text(servers):
    assert servers.store().add("count", 2) == 2
    assert servers.store().add("count", 3) == 5
    assert servers.store().get("count") == b"5"


def test_generations_do_not_see_each_other(servers):
    servers.store(1).set("a/0", b"old")
    assert not servers.store(2).check(["a/0"])


@pytest.mark.parametrize("how", ["the next generation", "a cancel"])
def test_whoever_waits_is_freed_by(servers, how):
    store = servers.store(1)
    store.check(["a/0"])  # it is connected from here on
    failed: list[Exception] = []

    def wait() -> None:
        try:
            store.get("a/0")
        except GenerationOverError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    if how == "a cancel":
        while not store._lock.locked():
            pass
        store.cancel()
    else:
        servers.enter(2)
    waiting.join(10)
    assert len(failed) == 1


def test_a_peer_without_the_secret_gets_nothing(servers):
    servers.store().set("a/0", b"private")
    with pytest.raises(ConnectionError):
        servers.store(secret=b"wrong" * 4).get("a/0")


def test_a_server_without_the_secret_is_not_believed():
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        connection, _ = listener.accept()
        with connection:
            wire.send(connection, {"nonce": "n"})
            wire.receive(connection)
            wire.send(connection, {"proof": "trust me"})

    thread = threading.Thread(target=impostor)
    thread.start()
    with socket.create_connection(listener.getsockname()) as ours, pytest.raises(wire.WireError, match="not our job"):
        wire.join_peer_blocking(ours, SECRET)
    thread.join()
    listener.close()


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"\xff\xff\xff\xff", "announces 4294967295 bytes"),
        (b"\x00\x00\x00\x05hell", "middle of a frame"),
        (b"\x00\x00", "middle of a frame"),
        (b"\x00\x00\x00\x02[]", "not a JSON object"),
        (b"\x00\x00\x00\x02\x80\x04", "not JSON"),
    ],
)
def test_bytes_that_are_not_of_the_protocol_are_refused(frame, words):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(frame)
        with pytest.raises(wire.WireError, match=words):
            wire.receive(ours)
