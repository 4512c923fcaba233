"""What happens around NIXL: copies arrive over TCP where it does not work, and what it writes late harms nobody."""

from __future__ import annotations

import os
import signal

import pytest
from nixl_stand_in import environment
from peer_node import MIB, content, steps
from waiting import until

from hyperpod_ext.runtime.memory_server.client.peer_socket import CHUNK
from hyperpod_ext.runtime.memory_server.protocol.nixl_requests import Exposed
from hyperpod_ext.runtime.memory_server.replication import nixl_transfer
from hyperpod_ext.runtime.memory_server.replication.nixl_transfer import is_signed, signed_offer

pytestmark = pytest.mark.slow  # each starts processes

DATA = content(9 * CHUNK + 17)


def held(node, save_id: str) -> bytes:
    with node.replicas.pin(0, save_id, "test") as pin, pin.data as data:
        return bytes(data)


@pytest.fixture
def pair(make_node, tmp_path):
    """Makes two nodes whose NIXL does what the receiver's name says."""

    def make(does: str = "read", version: str = "1.5.1", transport: str = "nixl"):
        there = environment(tmp_path / "receiver", does, version)
        a = make_node(0, transport="nixl", environment=environment(tmp_path / "sender"))
        b = make_node(1, transport=transport, environment=there, timeout_s=30.0)
        a.replicator.set_peers({1: b.address})
        return a, b

    return make


def test_the_receiver_reads_from_the_senders_memory(pair):
    a, b = pair()
    for step in (1, 2, 3):
        a.save(0, step, DATA[step:])
        assert a.replicator.wait_idle(60)
        assert held(b, f"g1-s{step}") == DATA[step:]
    assert a.replicator.status()["fell_back"] == ""


@pytest.mark.parametrize(
    ("does", "options", "why"),
    [
        ("missing", {}, "nixl-cu13 is not installed; nixl-cu12 is not installed"),
        ("read", {"version": "1.4.0"}, "has NIXL 1.4.0, this one 1.5.1"),
        ("read", {"transport": "tcp"}, "does not use NIXL"),
        ("error", {}, "NIXL reports an error"),
        ("hang", {}, "no answer for"),
        ("damage", {}, "differ from the snapshot"),
    ],
)
def test_a_copy_that_nixl_does_not_bring_goes_over_tcp(pair, monkeypatch, does, options, why):
    monkeypatch.setattr(nixl_transfer, "_ANSWER_S", 2.0)
    a, b = pair(does, **options)
    for step in (1, 2):
        a.save(0, step, DATA[step:])
        assert a.replicator.wait_idle(60)
        assert held(b, f"g1-s{step}") == DATA[step:]
    status = a.replicator.status()
    assert (status["failed"], status["copies"]) == (0, 2)
    assert why in status["fell_back"]


def test_where_the_sender_has_no_nixl_copies_go_over_tcp(make_node, tmp_path):
    a = make_node(0, transport="nixl", environment=environment(tmp_path, "missing"))
    b = make_node(1, transport="nixl", environment=environment(tmp_path / "there"))
    a.replicator.set_peers({1: b.address})
    a.save(0, 1, DATA)
    assert a.replicator.wait_idle(60)
    assert held(b, "g1-s1") == DATA
    assert "is not installed" in a.replicator.status()["fell_back"]


def test_no_snapshot_is_held_while_nixl_starts(make_node, tmp_path, monkeypatch):
    monkeypatch.setattr(nixl_transfer, "_START_S", 2.0)
    a, b = make_node(0, transport="nixl", environment=environment(tmp_path, "stuck")), make_node(1)
    a.replicator.set_peers({1: b.address})
    a.save(0, 1, DATA)
    until(a.nixl._lock.locked)
    assert a.own._pins == []
    assert a.replicator.wait_idle(60)
    assert held(b, "g1-s1") == DATA
    assert "timed out" in a.replicator.status()["fell_back"]


def test_once_the_nodes_are_others_it_is_tried_again(pair):
    a, b = pair("error")
    a.save(0, 1, DATA)
    assert a.replicator.wait_idle(60)
    assert a.replicator.status()["fell_back"]
    a.replicator.set_peers({1: b.address})
    a.save(0, 2, content(MIB))
    assert a.replicator.wait_idle(60)
    assert (steps(b.replicas), a.replicator.status()["fell_back"]) == ([1, 2], "")


def test_a_read_that_is_given_up_writes_nothing_later(pair, make_node, tmp_path):
    a, b = pair("late")
    a.save(0, 1, DATA)
    incoming = b.incoming()
    until(
        lambda: any(len({checksum is None for checksum in one.checksums.values()}) == 2 for one in [*incoming.values()])
    )
    late = b.nixl._process
    other = make_node(2)
    other.replicator.set_peers({1: b.address})
    other.save(0, 2, DATA[2:])
    assert other.replicator.wait_idle(60)
    assert late.popen.poll() == -signal.SIGKILL
    (tmp_path / "receiver" / "gate").touch()
    assert held(b, "g1-s2") == DATA[2:]
    a.replicator.close()


def test_an_offer_is_the_jobs():
    exposed = Exposed(metadata="bWV0YQ==", address=4096)
    offer = signed_offer(7, "1.5.1", exposed, 64, b"s" * 32)
    assert (offer.address, is_signed(offer, b"s" * 32), is_signed(offer, b"x" * 32)) == (4160, True, False)
    changed = offer.model_copy(update={"metadata": "bWV0YR=="})
    assert not is_signed(changed, b"s" * 32)


@pytest.mark.nixl
@pytest.mark.falls_back
@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
@pytest.mark.parametrize("whose", ["sender", "receiver"])
def test_a_nixl_process_killed_halfway_costs_no_copy(make_node, whose):
    a, b = make_node(0), make_node(1)
    a.replicator.set_peers({1: b.address})
    a.save(0, 1, content(MIB, 1))
    assert a.replicator.wait_idle(60)
    assert a.replicator.status()["fell_back"] == ""
    a.replicator.rate_limit.rate = 32 * MIB
    data = content(64 * MIB, 2)
    a.save(0, 2, data)
    until(lambda: any(replica.checksums for replica in b.incoming().values()))
    os.kill((a if whose == "sender" else b).nixl._process.popen.pid, signal.SIGKILL)
    assert a.replicator.wait_idle(60)
    assert held(b, "g1-s2") == data
    assert a.replicator.status()["fell_back"]
    assert a.replicator.status()["failed"] == 0
