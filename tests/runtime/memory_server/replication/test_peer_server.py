"""What a peer server refuses: liars, strangers, and replicas that never became whole."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import damaged
import pytest
from peer_node import JOB, MIB, SECRET, content, plan_of, steps
from waiting import until

from hyperpod_ext.errors import CorruptSnapshotError, NotFoundError, UnreachableError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient
from hyperpod_ext.runtime.memory_server.protocol.peer_requests import PEER_REQUESTS
from hyperpod_ext.runtime.snapshot.manifest import FORMAT, Manifest, crc64nvme, crc_text, save_id_of, sign

DATA = content(2 * ps.CHUNK + 1000)


class Talker:
    """A peer with the secret that says what it likes."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = ps.connect(*address, SECRET)

    def ask(self, request: dict[str, Any], raw: bytes | memoryview = b"") -> wire.Message:
        wire.send(self.sock, request)
        self.sock.sendall(raw)
        answer = wire.receive(self.sock)
        assert answer is not None
        return answer

    def begin(self, manifest: Manifest, plan: object = None) -> wire.Message:
        return self.ask({"op": "replica_begin", "manifest": manifest, "plan": plan})

    def token(self, step: int = 1) -> int:
        return int(self.begin(manifest_of(DATA, step), plan_of(len(DATA)).to_json())["token"])

    def chunk(self, token: int, start: int, data: bytes) -> wire.Message:
        part = data[start : start + ps.CHUNK]
        return self.ask({"op": "chunk", "token": token, "start": start, "nbytes": len(part)}, part)

    def end(self, token: int) -> wire.Message:
        return self.ask({"op": "replica_end", "token": token})

    def replicate(self, step: int, data: bytes = DATA) -> wire.Message:
        token = self.token(step)
        for start in range(0, len(data), ps.CHUNK):
            assert self.chunk(token, start, data) == {}
        return self.end(token)


def manifest_of(data: bytes, step: int = 1, **changes: object) -> Manifest:
    own = {"format": FORMAT, "job": JOB, "rank": 0, "step": step, "save_id": save_id_of(1, step), "generation": 1}
    known = {"nbytes": len(data), "crc64nvme": crc_text(crc64nvme(data)), "plan": plan_of(len(data)).digest}
    return sign({**own, **known, "values": [], **changes}, SECRET)


def code(answer: wire.Message) -> str:
    return str(answer["error"]["code"])


@pytest.fixture
def node(make_node):
    return make_node(1)


@pytest.fixture
def talker(node):
    return Talker(node.address)


def test_damaged_requests_are_refused_by_name_and_cost_the_server_nothing(node):
    for message in damaged.messages(PEER_REQUESTS, 300, "op"):
        answer = Talker(node.address).ask(message)  # and it hangs up: bytes of an image may follow
        assert answer["error"]["message"], message
    assert Talker(node.address).replicate(1) == {}


def test_a_byte_flipped_on_the_way_is_found_and_the_older_replica_stays(node, talker):
    assert talker.replicate(1) == {}
    flipped = bytearray(DATA)
    flipped[ps.CHUNK + 5] ^= 1
    answer = talker.replicate(2, bytes(flipped))
    assert code(answer) == "CorruptSnapshotError"
    assert "CRC64-NVME" in answer["error"]["message"]
    assert steps(node.replicas) == [1]
    assert talker.replicate(3) == {}
    assert steps(node.replicas) == [1, 3]


def test_a_replica_with_a_part_missing_is_not_taken(node, talker):
    token = talker.token()
    talker.chunk(token, 0, DATA)
    talker.chunk(token, 2 * ps.CHUNK, DATA)
    answer = talker.end(token)
    assert "were not received" in answer["error"]["message"]
    assert steps(node.replicas) == []


def test_half_a_replica_is_never_shown(node, talker):
    token = talker.token()
    talker.chunk(token, 0, DATA)
    assert node.client().held() == ([], [])
    with pytest.raises(NotFoundError):
        node.client().open(0, "g1-s1", job=JOB)


def test_a_connection_lost_halfway_frees_its_slot(node):
    Talker(node.address).replicate(1)
    for step in (2, 3, 4):
        lost = Talker(node.address)
        token = lost.token(step)
        wire.send(lost.sock, {"op": "chunk", "token": token, "start": 0, "nbytes": ps.CHUNK})
        lost.sock.sendall(DATA[:1000])
        lost.sock.close()
    until(lambda: not node.incoming())
    assert steps(node.replicas) == [1]
    assert Talker(node.address).replicate(5) == {}
    assert steps(node.replicas) == [1, 5]


def test_a_newer_attempt_takes_the_place_of_one_that_hangs(node, talker):
    hanging = Talker(node.address)
    token = hanging.token(1)
    wire.send(hanging.sock, {"op": "chunk", "token": token, "start": 0, "nbytes": ps.CHUNK})
    hanging.sock.sendall(b"x" * 1000)  # and no more: this thread of the server waits for the rest
    until(lambda: any(replica.receiving for replica in node.incoming().values()))
    assert talker.replicate(1) == {}
    with pytest.raises(OSError):  # noqa: PT011  cut off
        hanging.sock.sendall(b"x" * ps.CHUNK * 8)
    assert steps(node.replicas) == [1]


def test_a_plan_is_asked_for_once(node, talker):
    manifest = manifest_of(DATA)
    assert talker.begin(manifest) == {"token": None, "first": 0, "need_plan": True, "have": False}
    assert talker.begin(manifest, plan_of(len(DATA)).to_json())["token"] is not None
    assert talker.begin(manifest)["token"] is not None


@pytest.mark.parametrize(
    ("manifest", "plan", "message"),
    [
        (manifest_of(DATA), plan_of(5).to_json(), "does not have the digest in its manifest"),
        (manifest_of(DATA), {"items": 3}, "cannot be read"),
        (manifest_of(DATA, nbytes=1 << 50), plan_of(len(DATA)).to_json(), "the layout plan of g1-s1 lists"),
        (manifest_of(DATA) | {"nbytes": 1 << 50}, None, "not signed with this job's secret"),
        (manifest_of(DATA, job="other"), None, "belongs to job 'other'"),
        ({"rank": 0}, None, "format None is newer"),
        ([], None, "replica_begin: field `manifest` should be a valid object"),
    ],
)
def test_a_replica_that_makes_no_sense_reserves_nothing(node, talker, manifest, plan, message):
    assert message in talker.begin(manifest, plan)["error"]["message"]
    assert node.replicas.owners() == []


@pytest.mark.parametrize("start", [1, 3 * ps.CHUNK, 1 << 60])
def test_a_chunk_outside_of_what_is_due_is_read_over(talker, start):
    token = talker.token()
    assert code(talker.ask({"op": "chunk", "token": token, "start": start, "nbytes": 1000}, b"x" * 1000)) == (
        "NotFoundError"
    )
    assert talker.chunk(token, 0, DATA) == {}
    assert code(talker.chunk(token, 0, DATA)) == "NotFoundError"  # twice the same
    assert code(talker.chunk(token + 1, ps.CHUNK, DATA)) == "NotFoundError"
    assert code(talker.ask({"op": "nonsense"})) == "HyperpodExtError"


def test_a_request_that_nobody_declared_ends_the_connection(talker):
    token = talker.token()
    told = talker.ask({"op": "chunk", "token": token, "start": -ps.CHUNK, "nbytes": 1000})
    assert "chunk: field `start` should be greater than or equal to 0" in told["error"]["message"]
    assert wire.receive(talker.sock) is None


def test_a_chunk_of_any_size_cannot_be_announced(talker):
    token = talker.token()
    wire.send(talker.sock, {"op": "chunk", "token": token, "start": 0, "nbytes": 2 * ps.CHUNK})
    with pytest.raises(OSError):  # noqa: PT011  cut off, not read over
        talker.ask({"op": "held"}, bytes(2 * ps.CHUNK))


def test_a_stranger_is_told_nothing_and_makes_nobody_allocate(node):
    with socket.create_connection(node.address) as stranger:
        wire.receive(stranger)  # a nonce
        stranger.sendall(struct.pack(">I", 63 << 20))
        assert stranger.recv(100) == b""
    with socket.create_connection(node.address) as stranger:
        wire.receive(stranger)
        wire.send(stranger, {"nonce": "n", "proof": "p"})
        assert wire.receive(stranger) == {"refused": True}
        assert stranger.recv(100) == b""


def test_a_manifest_in_place_of_another_is_not_taken(node, talker):
    talker.replicate(1)
    client = node.client()
    with pytest.raises(NotFoundError):
        client.open(0, "g1-s2", job=JOB)
    with pytest.raises(CorruptSnapshotError, match="belongs to job"):
        client.open(0, "g1-s1", job="other")


# --- reading ------------------------------------------------------------------------------------


def test_pieces_are_read_to_where_they_belong_and_the_gaps_are_checksummed_too(node):
    data = content(5 * MIB + 321)
    node.save(3, 1, data)
    places = [(64, 100), (200, 3 * MIB), (3 * MIB + 400, 1), (3 * MIB + 401, 0), (4 * MIB, 2000), (5 * MIB, 321)]
    for streams in (1, 2, 3, 7):
        pieces = [(start, memoryview(bytearray(nbytes))) for start, nbytes in places]
        assert node.client().read_scattered(3, "g1-s1", pieces, len(data), streams) == crc64nvme(data)
        for start, piece in pieces:
            assert bytes(piece) == data[start : start + len(piece)]


def test_many_small_pieces_with_gaps(node):
    data = content(3 * MIB)
    node.save(0, 1, data)
    pieces = [(start, memoryview(bytearray(500))) for start in range(24, len(data) - 600, 700)]
    assert node.client().read_scattered(0, "g1-s1", pieces, len(data)) == crc64nvme(data)
    assert all(bytes(piece) == data[start : start + 500] for start, piece in pieces)


def test_an_image_without_a_piece_is_still_checksummed(node):
    data = content(5 * MIB)
    node.save(0, 1, data)
    assert node.client().read_scattered(0, "g1-s1", [], len(data)) == crc64nvme(data)


def test_parts_of_an_image_come_alone_once_all_of_it_is_verified_there(node, monkeypatch):
    data, came = content(5 * MIB + 321), list[int]()
    receive = ps.receive_scattered

    def counted(sock: socket.socket, destinations: list[memoryview], previous: int = 0) -> int:
        came.append(sum(map(len, destinations)))
        return receive(sock, destinations, previous)

    monkeypatch.setattr(ps, "receive_scattered", counted)
    node.save(3, 1, data)
    places = [(64, 100), (200, MIB), (3 * MIB + 400, 0), (4 * MIB, 2000), (200, 7)]  # in any order, and twice
    parts = [(start, memoryview(bytearray(nbytes))) for start, nbytes in places]
    node.client().read_parts(3, "g1-s1", parts, len(data))
    for start, part in parts:
        assert bytes(part) == data[start : start + len(part)]
    assert came == [MIB + 2107]
    with pytest.raises(NotFoundError, match="but more were requested"):
        node.client().read_parts(3, "g1-s1", [(len(data) - 1, memoryview(bytearray(2)))], len(data))
    with pytest.raises(NotFoundError):
        node.client().read_parts(3, "g1-s2", parts, len(data))


def test_no_part_is_handed_out_of_an_image_that_is_damaged_elsewhere(node):
    data = content(MIB)
    node.save(0, 1, data)
    with node.own.pin(0, "g1-s1", "damage") as pin, pin.data as memory:
        memory[MIB - 1] ^= 1
    part = memoryview(bytearray(100))
    with pytest.raises(CorruptSnapshotError, match="CRC64-NVME"):
        node.client().read_parts(0, "g1-s1", [(0, part)], len(data))
    assert bytes(part) == bytes(100)


def test_nobody_accepts_any_more_when_the_listening_socket_is_closed(make_node, monkeypatch):
    """Another server's may have its number by then, and the peers of that one would be answered by this one."""
    node = make_node(1)
    peers = node.server._accepting
    alive_at_close = []

    class Listener(socket.socket):
        __slots__ = ()

        def close(self) -> None:
            alive_at_close.append(peers.is_alive())
            super().close()

    monkeypatch.setattr(node.server._listener, "__class__", Listener)
    assert peers.is_alive()
    node.server.close()
    assert alive_at_close == [False]


@pytest.mark.parametrize("places", [[(0, 10), (5, 10)], [(10, 5), (0, 5)], [(95, 10)]])
def test_pieces_that_overlap_are_refused(node, places):
    node.save(0, 1, content(100))
    pieces = [(start, memoryview(bytearray(nbytes))) for start, nbytes in places]
    with pytest.raises(ValueError, match="the pieces overlap"):
        node.client().read_scattered(0, "g1-s1", pieces, 100)


def test_a_range_outside_of_the_image_is_refused_and_the_connection_goes_on(node):
    node.save(0, 1, content(100))
    client = node.client()
    for start in (91, 1 << 60):
        with pytest.raises(NotFoundError, match="no 10 bytes at"):
            client.read_into(0, "g1-s1", start, memoryview(bytearray(10)))
    part = memoryview(bytearray(10))
    assert client.read_into(0, "g1-s1", 90, part) == crc64nvme(content(100)[90:])


def test_a_server_that_dies_while_it_is_read_is_unreachable():
    listener = socket.create_server(("127.0.0.1", 0))

    def die() -> None:
        connection, _ = listener.accept()
        ps.accept(connection, SECRET, 10)
        wire.receive(connection)  # the version
        wire.receive(connection)
        wire.send(connection, {"nbytes": 100})
        connection.sendall(b"x" * 50)
        connection.close()

    threading.Thread(target=die, daemon=True).start()
    with pytest.raises(UnreachableError, match="in the middle of a"):
        PeerClient(*listener.getsockname(), SECRET).read_into(0, "g1-s1", 0, memoryview(bytearray(100)))


def test_a_server_that_says_nothing_is_given_up():
    listener = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(UnreachableError):
        PeerClient(*listener.getsockname(), SECRET, timeout_s=0.1).held()


def test_a_snapshot_that_is_read_is_not_overwritten(node):
    data = content(32 * MIB)
    node.save(0, 1, data)
    reader = Talker(node.address)
    wire.send(reader.sock, {"op": "read", "owner": 0, "save_id": "g1-s1", "start": 0, "nbytes": len(data)})
    assert wire.receive(reader.sock) == {"nbytes": len(data)}
    for step in range(2, 8):
        node.save(0, step, bytes(len(data)))
    destination = memoryview(bytearray(len(data)))
    assert ps.receive_checked(reader.sock, destination) == crc64nvme(data)


def test_a_client_finds_a_server_that_was_started_anew(make_node):
    node = make_node(1)
    client = node.client()
    assert client.held() == ([], [])
    port = node.server.port
    node.close()
    until(lambda: client._idle and ps.wait_readable(client._idle[0], 0.1))
    again = make_node(2)
    client._port = again.server.port if again.server.port != port else port
    assert client.held() == ([], [])
