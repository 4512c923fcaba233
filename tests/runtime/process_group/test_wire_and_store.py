"""Frames, handshakes, and the store that process groups meet in."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import warm_code
from torch._C._distributed_c10d import HashStore, Store
from waiting import until

from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.protocol.requests import AddPlan
from hyperpod_ext.runtime.process_group.store import (
    Endpoint,
    GenerationOverError,
    LastingStore,
    PartitionedStore,
    owner_of,
)
from hyperpod_ext.runtime.process_group.store_keys import StoreKeys

SECRET = b"0123456789abcdef"


class Job:
    """Four ranks' parts of the store."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.ranks = [Endpoint(rank, SECRET, self.errors.append) for rank in range(4)]
        self.addresses = [("127.0.0.1", rank.port) for rank in self.ranks]

    def store(self, rank: int = 0, generation: int = 1) -> PartitionedStore:
        return self.ranks[rank].open(self.addresses, generation)

    def strange(self, secret: bytes) -> PartitionedStore:
        """Of a process that is none of the ranks."""
        return PartitionedStore(self.addresses, 1, secret)


@pytest.fixture
def job() -> Iterator[Job]:
    found = Job()
    yield found
    for rank in found.ranks:
        rank.close()
    assert found.errors == []
    assert not [thread for thread in threading.enumerate() if thread.name == "hpx-store"]


@pytest.mark.parametrize("reader", range(4))
def test_what_one_rank_sets_another_gets(job, reader):
    job.store(1).set("0//cpu//0/2", b"\x00address\xff")
    assert job.store(reader).get("0//cpu//0/2") == b"\x00address\xff"
    assert job.store(reader).check(["0//cpu//0/2"])
    assert not job.store(reader).check(["0//cpu//0/3"])


def test_a_value_may_be_larger_than_sockets_hold(job):
    big = bytes(range(256)) * (20 << 12)
    job.store(1).set("big/2", big)
    assert job.store(3).get("big/2") == big


def test_many_threads_of_many_ranks_get_what_comes_late(job):
    got: list[bytes] = []
    stores = [job.store(rank) for rank in range(4)]
    waiting = [
        threading.Thread(target=lambda s=store, k=f"late/{owner}": got.append(s.get(k)))
        for store in stores
        for owner in range(4)
        for _ in range(4)
    ]
    for thread in waiting:
        thread.start()
    for owner in range(4):
        stores[owner].set(f"late/{3 - owner}", b"there")
    for thread in waiting:
        thread.join(10)
    assert got == [b"there"] * 64


def test_keys_live_on_the_rank_they_name(job):
    store = job.store()
    for rank in range(4):
        store.set(f"x/{rank}", b"")
    assert [rank.requests for rank in job.ranks] == [1, 1, 1, 1]
    assert owner_of("x/3", 4) == 3
    assert owner_of("x/7", 4) == owner_of("x/7", 4) < 4


def test_keys_of_a_subgroup_live_on_its_members():
    members = {"3": [5, 9], "a1b2": [7]}
    assert owner_of("0//3//cpu//0/1", 16, members) == 9
    assert owner_of("0//a1b2//cpu//0/0", 16, members) == 7
    assert owner_of("0//cpu//0/11", 16, members) == 11
    assert owner_of("0//4//cpu//0/1", 16, members) == 1
    assert owner_of("0//3//cpu//reconfigure/1048576/0/1", 16, members) == 9
    assert owner_of("0//cpu//reconfigure/1048576/0/11", 16, members) == 11


def idle_lines(endpoint: Endpoint) -> Any:
    """Its connections that wait for the next request, by the rank at the other end."""
    return endpoint._connections._idle


def test_lines_to_ranks_that_stay_are_kept(job):
    job.store(0).set("x/1", b"")
    before = dict(idle_lines(job.ranks[0]))
    assert [len(lines) for lines in before.values()] == [1]
    job.store(0, generation=2).set("x/1", b"")
    assert idle_lines(job.ranks[0]) == before


def test_a_rank_that_came_anew_is_found(job):
    job.store(0).set("x/1", b"old")
    job.ranks[1].close()
    job.ranks[1] = Endpoint(1, SECRET, job.errors.append)
    job.addresses[1] = ("127.0.0.1", job.ranks[1].port)
    job.store(0, generation=2).set("x/1", b"new")
    assert job.store(2, generation=2).get("x/1") == b"new"


def test_a_line_that_broke_while_idle_is_made_again(job):
    store = job.store(0)
    store.set("x/1", b"old")
    for lines in idle_lines(job.ranks[0]).values():
        lines[0].socket.shutdown(socket.SHUT_RDWR)
    store.set("x/1", b"new")
    assert store.get("x/1") == b"new"


def test_a_dead_rank_is_an_error_not_a_wait(job):
    job.ranks[3].close()
    with pytest.raises(ConnectionError):
        job.store(0).get("x/3")


ADDRESS = "0//1//cpu//0/1"
"""A key as gloo names them: set once in a generation."""


def served(job: Job, rank: int = 1) -> int:
    return job.ranks[rank].requests


def test_a_key_that_one_generation_needed_comes_unasked_in_the_next(job):
    for generation, asked in ((1, 2), (2, 3), (3, 4), (7, 5)):  # 1: the set and the get; later: the set alone
        stores = [job.store(rank, generation) for rank in (0, 1)]
        stores[1].set(ADDRESS, f"of {generation}")
        stores[0].wait([ADDRESS])
        assert stores[0].get(ADDRESS) == f"of {generation}".encode()
        assert served(job) == asked


def test_a_key_that_is_not_needed_is_sent_no_more(job):
    for generation in (1, 2, 3, 4):
        stores = [job.store(rank, generation) for rank in (0, 1)]
        stores[1].set(ADDRESS if generation != 2 else "other/1", b"")
        if generation in (1, 4):
            stores[0].get(ADDRESS)
    assert served(job) == 6, "4 sets, and a get of 1 and of 4"


def test_whoever_is_quicker_than_the_owner_asks(job):
    got: list[bytes] = []
    for generation in (1, 2):
        stores = [job.store(rank, generation) for rank in (0, 1)]
        before = served(job)
        waiting = threading.Thread(target=lambda store=stores[0]: got.append(store.get(ADDRESS)))
        waiting.start()
        until(lambda before=before: served(job) > before)
        stores[1].set(ADDRESS, f"of {generation}")
        waiting.join(10)
    assert got == [b"of 1", b"of 2"]
    job.store(1, 3).set(ADDRESS, b"of 3")
    assert job.store(0, 3).get(ADDRESS) == b"of 3", "no value of before lies on the line"


def test_a_watch_ends_with_the_line_and_the_key_is_asked_for_again(job):
    for generation, asked in ((1, 2), (2, 4), (3, 5)):
        stores = [job.store(rank, generation) for rank in (0, 1)]
        for lines in idle_lines(job.ranks[0]).values() if generation == 2 else ():
            lines[0].socket.shutdown(socket.SHUT_RDWR)
        stores[1].set(ADDRESS, f"of {generation}")
        assert stores[0].get(ADDRESS) == f"of {generation}".encode()
        assert served(job) == asked


def test_a_rank_that_has_another_number_now_is_not_taken_for_the_former_one(job):
    for generation in (1, 2):
        job.store(1, generation).set(ADDRESS, b"of the first")
        assert job.store(0, generation).get(ADDRESS) == b"of the first"
    job.addresses[1], job.addresses[2] = job.addresses[2], job.addresses[1]
    job.ranks[1].rank, job.ranks[2].rank = 2, 1
    job.store(1, 3).set("0//1//cpu//0/2", b"of the first")
    job.store(2, 3).set(ADDRESS, b"of the second")
    assert job.store(0, 3).get(ADDRESS) == b"of the second"


def test_a_key_that_may_be_set_again_is_asked_for_each_time(job):
    for value in (b"one", b"two"):
        job.store(1).set("a/1", value)
        assert job.store(0).get("a/1") == value
    stores = job.store(0), job.store(1)
    for value in (b"three", b"four"):
        stores[1].set("a/1", value)
        assert stores[0].get("a/1") == value


def test_a_client_that_reads_nothing_is_told_no_more_than_its_line_holds(job):
    server, big = job.ranks[1]._server, "x" * (1 << 20)
    job.store(1).set(ADDRESS, big)
    assert len(job.store(0).get(ADDRESS)) == len(big)
    (peer,) = server._peers
    for generation in range(2, 30):
        job.store(1, generation).set(ADDRESS, big)
        assert len(peer.unsent) < 2 * len(big)
    assert len(job.store(0, generation).get(ADDRESS)) == len(big), "it asks"


def test_who_has_gone_watches_nothing():
    told: list[str] = []
    keys: StoreKeys[str] = StoreKeys(lambda clients, _: told.extend(sorted(clients)))
    for client in ("one", "other"):
        keys.answer({"op": "get", "key": "a", "generation": 1, "timeout": 9, "watch": True}, lambda _: None, client)
    keys.enter(2)
    keys.forget("one")
    keys.answer({"op": "set", "key": "a", "generation": 2, "value": ""}, lambda _: None, "owner")
    assert told == ["other"]


def test_a_watch_ends_with_a_generation_in_which_the_key_was_not_set():
    told: list[int] = []
    keys: StoreKeys[str] = StoreKeys(lambda _, message: told.append(message["generation"]))
    keys.answer({"op": "get", "key": "a", "generation": 1, "timeout": 9, "watch": True}, lambda _: None, "client")
    for generation, key in ((2, "a"), (4, "a"), (5, "other"), (6, "a")):
        keys.enter(generation - 1)  # a generation may be over before anything was set in it
        keys.enter(generation)
        keys.answer({"op": "set", "key": key, "generation": generation, "value": ""}, lambda _: None)
    assert told == [2, 4]


def test_a_get_waits_for_the_set(job):
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(job.store().get("later/1")))
    waiting.start()
    job.store().set("later/1", b"now")
    waiting.join(10)
    assert got == [b"now"]


def test_a_get_that_nobody_answers_ends_after_its_timeout(job):
    store = job.store()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(GenerationOverError, match="no rank has set 'never/1'"):
        store.get("never/1")
    with pytest.raises(GenerationOverError, match="no rank has set 'never/0'"):
        store.get("never/0")  # its own


def test_a_counter_counts_and_reads_as_text(job):
    assert job.store().add("count", 2) == 2
    assert job.store().add("count", 3) == 5
    assert job.store().get("count") == b"5"


def sets_if_as_expected(store: Store) -> list[bytes]:
    """Keys that are not there, that have the expected value, and another; then what each has."""
    store.set("there", "old")
    store.set("another", "old")
    told = [
        store.compare_set("new", "", "mine"),
        store.compare_set("new", "", "too late"),
        store.compare_set("there", "old", "mine"),
        store.compare_set("another", "not this", "mine"),
        store.compare_set("nowhere", "not this", "mine"),
    ]
    return [*told, *(store.get(key) for key in ("new", "there", "another"))]


def test_a_key_is_set_if_it_is_as_expected_as_in_torchs_own_store(job):
    assert sets_if_as_expected(job.store()) == sets_if_as_expected(HashStore())
    assert sets_if_as_expected(job.strange(SECRET)) == sets_if_as_expected(HashStore()), "over the wire"


def test_groups_that_last_are_in_the_store_of_the_present_generation(job):
    lasting = LastingStore()
    lasting.set("alone", b"\x00")
    for generation in (1, 2):
        lasting.become(job.store(0, generation))
        assert not lasting.check(["alone"])
        assert not lasting.check(["key"])
        assert lasting.compare_set("key", "", "value") == b"value"
        assert lasting.multi_get(["key"]) == [job.store(1, generation).get("key")]
        lasting.wait(["key"])
        assert lasting.add("count", 2) == 2


def test_generations_do_not_see_each_other(job):
    job.store(generation=1).set("a/0", b"old")
    assert not job.store(generation=2).check(["a/0"])


def test_keys_of_a_generation_that_is_over_are_refused(job):
    old = job.store(1)
    job.store(0, generation=2)
    with pytest.raises(GenerationOverError, match="generation 1 is over"):
        old.set("a/0", b"late")


@pytest.mark.parametrize("key", ["a/0", "a/1"], ids=["own key", "another's key"])
@pytest.mark.parametrize("how", ["the owner's next generation", "a cancel"])
def test_whoever_waits_is_freed_by(job, how, key):
    store = job.store()
    served = [rank.requests for rank in job.ranks]
    failed: list[Exception] = []

    def wait() -> None:
        try:
            store.get(key)
        except GenerationOverError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while [rank.requests for rank in job.ranks] == served:
        pass
    if how == "a cancel":
        store.cancel()
    else:
        job.store(owner_of(key, 4), generation=2)
    waiting.join(10)
    assert len(failed) == 1


def test_a_cancelled_store_takes_no_more_calls(job):
    store = job.store()
    store.cancel()
    for key in ("a/0", "a/1"):
        with pytest.raises(GenerationOverError):
            store.set(key, b"")


def test_no_name_is_looked_up(job, monkeypatch):
    def look_up(*_: object) -> None:
        raise AssertionError("a name was looked up")

    for name in ("getaddrinfo", "gethostbyname", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, look_up)
    job.store().set("a/1", b"found")
    assert job.store(2).get("a/1") == b"found"


def test_a_peer_without_the_secret_gets_nothing(job):
    job.store().set("a/0", b"private")
    with pytest.raises(ConnectionError):
        job.strange(b"wrong" * 4).get("a/0")


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\x00\x00\x08\x00" + b"x" * 2048, b"\x00\x00\x00\x02[]"])
def test_a_stranger_that_sends_something_else_is_hung_up_on(job, sent):
    with socket.create_connection(job.addresses[0]) as stranger:
        stranger.settimeout(5)
        wire.receive(stranger)
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    job.store().set("a/0", b"")


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


def test_a_process_of_another_user_is_refused(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert wire.check_same_user(ours) == os.getpid()
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)  # the kernel says who the other side is
        with pytest.raises(wire.WireError, match="this socket is for user"):
            wire.check_same_user(ours)


def test_a_frame_over_the_limit_of_now_is_not_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.encode({"a": "x" * 100}))
        with pytest.raises(wire.WireError, match="for this peer, the limit is now 64"):
            wire.receive(ours, 64)


def test_a_message_of_ours_that_is_too_long_is_no_end_of_the_peer(job, monkeypatch):
    """It was taken for one, and the same message was sent to the next server, for ever."""
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    assert not issubclass(wire.TooLongError, ConnectionError)
    store, ours = job.store(1), socket.socketpair()
    with ours[0], ours[1]:
        client = object.__new__(MemoryClient)
        client._speaking, client._socket, client._handshake_done, client._another = (
            threading.RLock(),
            ours[0],
            True,
            True,
        )
        with pytest.raises(wire.TooLongError, match=r"a message `add_plan` of \d+ bytes is over the limit of 1000"):
            client._send(AddPlan(digest="d", document={"shape": "x" * 1000}))
        with pytest.raises(wire.TooLongError, match=r"a message `set` of \d+ bytes"):
            store.set("0//cpu//0/2", b"x" * 1000)
    store.set("0//cpu//0/2", b"x")
    assert job.store(0).get("0//cpu//0/2") == b"x"


def test_who_has_not_proved_anything_may_not_send_much():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.encode({"nonce": "n", "proof": "x" * 2000}))
        with pytest.raises(wire.WireError, match="the limit is now 1024"):
            wire.accept_peer_blocking(ours, SECRET)


def answer_to(nonce: str) -> wire.Message:
    """What an honest client says to the challenge `nonce`."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(theirs, {"nonce": nonce})
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(wire.BusyError):  # nobody proves anything to it
            wire.join_peer_blocking(ours, SECRET)
        answer = wire.receive(theirs)
    assert answer is not None
    return answer


def test_a_proof_is_for_one_challenge():
    answer = answer_to("first")
    assert wire.admit(SECRET, "first", answer)
    with pytest.raises(wire.WireError, match="refused"):
        wire.admit(SECRET, "second", answer)


def test_a_proof_is_for_the_number_that_came_with_it():
    with pytest.raises(wire.WireError, match="refused"):
        wire.admit(SECRET, "first", answer_to("first") | {"nonce": "another"})


def test_a_servers_proof_is_not_a_clients():
    answer = answer_to("first")
    servers = wire.admit(SECRET, "first", answer)["proof"]
    with pytest.raises(wire.WireError, match="refused"):
        wire.admit(SECRET, answer["nonce"], {"nonce": "first", "proof": servers})


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


REHEARSES = """
import os, threading
from hyperpod_ext.runtime.process_group.store import rehearse

def left():
    return sorted(os.listdir("/proc/self/fd")), threading.active_count()

rehearse()  # what is made once and kept
before = left()
rehearse()
assert left() == before, (left(), before)
"""


def test_a_rehearsal_leaves_nothing_that_a_forked_process_would_inherit():
    done = warm_code.run(REHEARSES)  # alone: what other tests have left running opens files, too
    assert done.returncode == 0, done.stderr
