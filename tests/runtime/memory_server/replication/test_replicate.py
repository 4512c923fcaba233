"""Snapshots copied from node to node, over real sockets, through deaths and slow peers."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
from peer_node import JOB, MIB, SECRET, content, steps
from waiting import until

from hyperpod_ext.errors import UnreachableError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient
from hyperpod_ext.runtime.memory_server.client.peer_socket import CHUNK
from hyperpod_ext.runtime.snapshot.manifest import check_bytes

BOTH_TRANSPORTS = True


def read(client: PeerClient, save_id: str, owner: int = 0) -> bytes:
    manifest, plan = client.open(owner, save_id, job=JOB)
    data = memoryview(bytearray(plan.nbytes))
    client.read_into(owner, save_id, 0, data)
    check_bytes(manifest, data)
    return bytes(data)


def sent_lately(node) -> int:
    """Bytes that a node has sent since its rate was last decided."""
    return node.replicator.rate_limit._sent


def state(node, owner: int, step: int) -> str:
    return next(b["state"] for b in node.own.held() if (b["rank"], b["step"]) == (owner, step))


@pytest.fixture
def pair(make_node):
    a, b = make_node(0), make_node(1)
    a.replicator.set_peers({0: a.address, 1: b.address})
    return a, b


@pytest.mark.parametrize("nbytes", [1, 1000, CHUNK, 3 * CHUNK, 3 * CHUNK + 17])
def test_a_snapshot_arrives_bit_for_bit(pair, nbytes):
    a, b = pair
    data = content(nbytes)
    a.save(0, 1, data)
    assert a.replicator.wait_idle(20)
    assert state(a, 0, 1) == "replicated"
    assert read(b.client(), "g1-s1") == data
    own, replicas = b.client().held()
    assert (own, [summary["state"] for summary in replicas]) == ([], ["sealed"])


def test_what_is_not_trained_is_sent_once_into_each_slot_of_a_peer(pair):
    a, b = pair
    base, nbytes = content(2 * CHUNK + 1000), 4 * CHUNK

    def send(step: int, start: bytes = base) -> int:
        before = a.replicator.status()["bytes_sent"]
        data = start + content(nbytes - len(start), step)
        a.save(0, step, data, frozen=len(start))
        assert a.replicator.wait_idle(20)
        assert read(b.client(), f"g1-s{step}") == data
        return a.replicator.status()["bytes_sent"] - before

    assert [send(step) for step in (1, 2, 3, 4)] == [nbytes, nbytes, nbytes - 2 * CHUNK, nbytes - 2 * CHUNK]
    changed = bytes([base[0] ^ 1]) + base[1:]
    assert [send(step, changed) for step in (5, 6, 7)] == [nbytes, nbytes, nbytes - 2 * CHUNK]
    (region,) = b.replicas._regions[0]
    for slot in range(2):
        region.memory[slot * region.slot_bytes + 5] ^= 1  # damaged since
    assert send(8, changed) == nbytes


def test_nodes_may_have_ipv6_addresses(make_node):
    a, b = make_node(0, host="::1"), make_node(1, host="::1")
    a.replicator.set_peers({0: a.address, 1: b.address})
    a.save(0, 1, content(1000))
    assert a.replicator.wait_idle(20)
    assert read(b.client(), "g1-s1") == content(1000)


def test_only_the_steps_that_are_due_are_copied(make_node):
    a, b = make_node(0, every_steps=3), make_node(1)
    a.replicator.set_peers({1: b.address})
    for step in range(1, 6):
        a.save(0, step, content(1000, step))
        assert a.replicator.wait_idle(20)
    assert steps(b.replicas) == [3]


def test_from_the_first_step_that_is_named_only_such_are_copied(make_node):
    a, b = make_node(0, every_steps=3), make_node(1)
    a.replicator.set_peers({1: b.address})
    for step in range(1, 10):
        if step == 4:
            a.replicator.ask(5)
            a.replicator.ask(8)
        a.save(0, step, content(1000, step))
        assert a.replicator.wait_idle(20)
        has = {1: [], 2: [], 3: [3], 4: [3], 5: [5], 6: [5], 7: [5], 8: [8], 9: [8]}
        assert steps(b.replicas)[-1:] == has[step]


def test_a_node_that_may_go_hands_over_what_is_not_due(make_node):
    a, b = make_node(0, every_steps=10), make_node(1)
    a.replicator.set_peers({1: b.address})
    for owner in range(2):
        a.save(owner, 13, content(1000, owner))
    assert a.replicator.wait_idle(20)
    assert steps(b.replicas) == []
    a.replicator.rate_limit.rate = 1.0  # a byte a second: what training may lose for a copy does not count now
    for owner in range(2):
        a.replicator.catch_up(owner, a.own.newest(owner))
    assert a.replicator.wait_idle(20)
    assert [read(b.client(), "g1-s13", owner) for owner in range(2)] == [content(1000, owner) for owner in range(2)]


def test_two_replicas_are_on_two_nodes(make_node):
    nodes = [make_node(number, replicas=2) for number in range(3)]
    nodes[0].replicator.set_peers({node.number: node.address for node in nodes})
    nodes[0].save(0, 1, content(5 * MIB))
    assert nodes[0].replicator.wait_idle(20)
    assert [steps(node.replicas) for node in nodes] == [[], [1], [1]]
    assert state(nodes[0], 0, 1) == "replicated"


def test_with_too_few_nodes_there_are_as_many_copies_as_can_be(make_node):
    a, b = make_node(0, replicas=2), make_node(1)
    a.replicator.set_peers({1: b.address})
    a.save(0, 1, b"x")
    assert a.replicator.wait_idle(20)
    assert steps(b.replicas) == [1]
    assert a.replicator.status()["too_few_nodes"]


def test_alone_nothing_is_copied_and_nothing_fails(make_node):
    a = make_node(0)
    a.replicator.set_peers({0: a.address})
    a.save(0, 1, b"x")
    assert a.replicator.status()["failed"] == 0
    assert state(a, 0, 1) == "sealed"


def test_the_snapshots_of_four_ranks_arrive_together(pair):
    a, b = pair
    threads = [
        threading.Thread(target=lambda owner=owner: a.save(owner, 1, content(9 * MIB, owner))) for owner in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert a.replicator.wait_idle(30)
    for owner in range(4):
        assert read(b.client(), "g1-s1", owner) == content(9 * MIB, owner)


@pytest.mark.parametrize("when_busy", ["wait", "supersede"])
def test_no_rank_gets_so_far_ahead_of_another_that_a_peer_has_no_step_of_both(make_node, when_busy):
    a, b = make_node(0, when_busy=when_busy, slots=3), make_node(1)
    a.replicator.set_peers({1: b.address})
    for step in (1, 2):
        for owner in (0, 1):
            a.save(owner, step, content(MIB, owner))
        assert a.replicator.wait_idle(20)
    a.save(0, 3, content(MIB))
    until(lambda: steps(b.replicas) == [2, 3])
    a.save(1, 3, content(MIB, 1), seal=False)
    a.save(0, 4, content(MIB))
    assert a.replicator.wait_idle(0.2) is False
    assert set(steps(b.replicas)) & set(steps(b.replicas, 1)) == {2}
    a.save(1, 3, content(MIB, 1))
    a.save(1, 4, content(MIB, 1))
    assert a.replicator.wait_idle(20)
    assert steps(b.replicas) == steps(b.replicas, 1) == [3, 4]


def test_a_rank_that_died_in_its_save_is_waited_for_until_the_next_generation_saves(make_node):
    a, b = make_node(0), make_node(1)
    a.replicator.set_peers({1: b.address})
    a.save(1, 1, content(MIB), seal=False)
    a.save(0, 2, content(MIB))
    assert a.replicator.wait_idle(0.2) is False
    a.save(0, 2, content(MIB), generation=2)
    assert a.replicator.wait_idle(20)
    assert "g2-s2" in [summary["save_id"] for summary in b.replicas.held()]


def test_a_rank_that_takes_its_save_back_holds_nobody_up(make_node):
    a, b = make_node(0), make_node(1)
    a.replicator.set_peers({1: b.address})
    a.save(1, 1, content(MIB), seal=False)
    a.save(0, 2, content(MIB))
    a.replicator.left_out(1)
    assert a.replicator.wait_idle(20)
    assert steps(b.replicas) == [2]


def test_a_rank_that_is_late_leaves_out_the_step_that_the_others_left_out(make_node):
    a, b = make_node(0), make_node(1)
    a.replicator.set_peers({1: b.address})
    for owner in (0, 1):
        a.save(owner, 1, content(MIB))
    assert a.replicator.wait_idle(20)
    a.save(1, 2, content(MIB), seal=False)
    a.save(0, 3, content(MIB))
    a.save(0, 4, content(MIB))  # takes the place of step 3, whose copy could not begin yet
    a.save(1, 2, content(MIB))
    a.save(1, 3, content(MIB))
    a.save(1, 4, content(MIB))
    assert a.replicator.wait_idle(20)
    assert 3 not in steps(b.replicas, 1)
    assert steps(b.replicas)[-1] == steps(b.replicas, 1)[-1] == 4


def test_nodes_with_another_secret_do_not_talk_to_each_other(make_node):
    a, b = make_node(0), make_node(1, secret=b"x" * 32)
    a.replicator.set_peers({1: b.address})
    a.save(0, 1, b"data")
    assert a.replicator.wait_idle(20)
    assert a.replicator.status()["failed"] == 1
    assert "127.0.0.1" in a.replicator.status()["last_error"]
    assert steps(b.replicas) == []
    with pytest.raises(UnreachableError):
        b.client(SECRET).held()
    with pytest.raises(UnreachableError):
        a.client(b"x" * 32).held()


def test_a_server_without_the_secret_learns_nothing():
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        wire.send(connection, {"nonce": "n"})
        wire.receive(connection)
        wire.send(connection, {"proof": "p"})

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(UnreachableError, match="does not have the job's secret"):
        PeerClient(*listener.getsockname(), SECRET).held()


def test_a_stale_generation_is_refused_by_the_peer(pair):
    a, b = pair
    b.replicas.fence(2, None)
    a.save(0, 1, b"x", generation=1)
    assert a.replicator.wait_idle(20)
    assert "generation 1 may not write step 1" in a.replicator.status()["last_error"]
    assert state(a, 0, 1) == "sealed"
    assert steps(b.replicas) == []


def test_a_peer_without_memory_left_says_so_and_keeps_what_it_has(make_node):
    a, b = make_node(0), make_node(1, budget=3 * MIB)
    a.replicator.set_peers({1: b.address})
    a.save(0, 1, content(MIB))
    assert a.replicator.wait_idle(20)
    a.save(1, 2, content(4 * MIB))
    assert a.replicator.wait_idle(20)
    assert "its budget is 3 MiB" in a.replicator.status()["last_error"]
    assert steps(b.replicas) == [1]


def test_a_sender_killed_halfway_leaves_the_older_replica_whole(make_node, start_process):
    b = make_node(1)
    sender = start_process(b.server.port)
    incoming = b.incoming()
    until(lambda: steps(b.replicas) == [1] and any(len(r.checksums) > 1 for r in [*incoming.values()]))
    os.kill(sender.pid, signal.SIGKILL)
    until(lambda: not incoming)
    assert steps(b.replicas) == [1]
    assert read(b.client(), "g1-s1") == content(8 * MIB, 1)


def test_a_peer_killed_halfway_costs_one_copy_and_another_peer_gets_it(make_node, start_process):
    a, c = make_node(0), make_node(2)
    peer = start_process()
    b = ("127.0.0.1", int(peer.stdout.readline()))
    a.replicator.set_peers({1: b})
    a.save(0, 1, content(MIB, 1))
    assert a.replicator.wait_idle(20)
    a.replicator.rate_limit.rate = 8 * MIB
    a.save(0, 2, content(32 * MIB, 2))
    until(lambda: sent_lately(a) > 12 * MIB)
    a.replicator.rate_limit.rate = 1 * MIB  # what is left takes long
    os.kill(peer.pid, signal.SIGKILL)
    a.replicator.rate_limit.rate = float("inf")
    assert a.replicator.wait_idle(20)
    assert (a.replicator.status()["failed"], state(a, 0, 2)) == (1, "sealed")
    a.replicator.set_peers({2: c.address})
    assert a.replicator.wait_idle(20)
    assert read(c.client(), "g1-s2") == content(32 * MIB, 2)
    assert state(a, 0, 2) == "replicated"


def test_a_peer_started_anew_gets_the_newest_snapshot_at_once(pair, make_node):
    a, b = pair
    a.save(0, 1, b"x")
    assert a.replicator.wait_idle(20)
    b.close()
    again = make_node(1)
    a.replicator.set_peers({1: again.address})
    assert a.replicator.wait_idle(20)
    assert steps(again.replicas) == [1]


def test_what_a_peer_has_is_not_sent_again(pair, make_node):
    a, b = pair
    a.save(0, 1, content(MIB))
    assert a.replicator.wait_idle(20)
    c = make_node(2)
    a.replicator.set_peers({2: c.address})
    a.replicator.set_peers({1: b.address})
    assert a.replicator.wait_idle(20)
    assert a.replicator.status()["bytes_sent"] in (MIB, 2 * MIB)
    assert read(b.client(), "g1-s1") == content(MIB)


def unheard() -> tuple[socket.socket, list[socket.socket]]:
    """A peer that joins, says where to send to, and then reads nothing any more."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def answer(connection: socket.socket) -> None:
        wire.accept_peer_blocking(connection, SECRET)
        if (wire.receive(connection) or {}).get("op") == "replica_begin":
            wire.send(connection, {"token": 1})

    def accept() -> None:
        while True:
            connections.append(listener.accept()[0])
            threading.Thread(target=answer, args=(connections[-1],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener, connections


def test_a_peer_that_takes_nothing_does_not_hold_up_saves(make_node):
    listener, _ = unheard()
    a = make_node(0, slots=2, timeout_s=100.0)  # so that every save needs the slot that is being copied
    a.replicator.set_peers({1: listener.getsockname()})
    for step in range(1, 12):
        a.save(0, step, content(MIB, 1) * 16)
        time.sleep(0.02)
    assert a.replicator.status()["failed"] == 0  # the first copy still waits for the peer: no save did
    assert a.replicator.status()["superseded"] > 0
    assert 11 in steps(a.own)


def test_a_peer_that_takes_nothing_is_given_up(make_node):
    listener, _ = unheard()
    a = make_node(0, timeout_s=1.0)
    a.replicator.set_peers({1: listener.getsockname()})
    a.save(0, 1, content(MIB, 1) * 16)
    assert a.replicator.wait_idle(10)
    assert "for 1 s" in a.replicator.status()["last_error"]


@pytest.mark.parametrize(("when_busy", "copied"), [("supersede", [1, 4]), ("wait", [3, 4]), ("skip", [1])])
def test_what_is_due_while_a_copy_is_in_flight(make_node, when_busy, copied):
    a, b = make_node(0, when_busy=when_busy, slots=3 if when_busy == "wait" else 4), make_node(1)
    a.replicator.set_peers({1: b.address})
    a.replicator.rate_limit.rate = 1 * MIB
    a.save(0, 1, content(MIB, 1) * 16)
    until(lambda: sent_lately(a) > 0)
    for step in (2, 3):
        a.save(0, step, content(MIB, step) * 16, when_busy=when_busy)
    if when_busy != "wait":
        a.save(0, 4, content(MIB, 4) * 16)
    a.replicator.rate_limit.rate = float("inf")
    if when_busy == "wait":
        a.save(0, 4, content(MIB, 4) * 16, when_busy=when_busy)
    assert a.replicator.wait_idle(20)
    assert steps(b.replicas) == copied
    counts = a.replicator.status()
    assert (counts["superseded"], counts["skipped"], counts["failed"]) == {
        "supersede": (2, 0, 0), "wait": (0, 0, 0), "skip": (0, 3, 0)
    }[when_busy]  # fmt: skip


def test_the_last_step_with_replicas_stays_until_the_one_after_the_next_is_copied(make_node):
    """Other nodes may not be done with the next one, and be lost then."""
    a, b = make_node(0, every_steps=10), make_node(1)
    a.replicator.set_peers({1: b.address})
    a.save(0, 10, content(MIB))
    assert a.replicator.wait_idle(20)
    for step in range(11, 20):
        a.save(0, step, content(MIB, step))
    assert 10 in steps(a.own)
    a.save(0, 20, content(MIB, 20))
    assert a.replicator.wait_idle(20)
    for step in range(21, 30):
        a.save(0, step, content(MIB, step))
    assert {10, 20} < set(steps(a.own))
    assert steps(b.replicas) == [10, 20]
    a.save(0, 30, content(MIB, 30))
    assert a.replicator.wait_idle(20)
    for step in range(31, 36):
        a.save(0, step, content(MIB, step))
    assert {20, 30} < set(steps(a.own))
    assert 10 not in steps(a.own)
    assert steps(b.replicas) == [20, 30]


def test_what_is_kept_of_ranks_that_are_elsewhere_is_let_go(make_node):
    a, b = make_node(0), make_node(1)
    a.replicator.set_peers({1: b.address})
    for owner in (0, 1):
        a.save(owner, 10, content(MIB, owner))
    assert a.replicator.wait_idle(20)
    for owner in (0, 1):
        a.own.drop_unused(owner)
    assert sorted(a.own.owners()) == [0, 1], "the last step with replicas stays"
    a.replicator.let_go({1, 7})
    for owner in (0, 1):
        a.own.drop_unused(owner)
    assert a.own.owners() == [0]


def test_steps_that_take_longer_beside_a_copy_slow_it_down_though_nothing_is_saved_meanwhile(pair):
    a, _ = pair

    def step(seconds: float) -> None:
        time.sleep(seconds)
        a.replicator.stepped(0)

    for _ in range(8):
        step(0.01)
    a.replicator.rate_limit.rate = before = 8 * MIB
    a.save(0, 1, content(MIB, 1) * 32)
    until(lambda: sent_lately(a) > 0)
    for _ in range(8):
        step(0.05)
    assert a.replicator.rate_limit.rate < before
    a.replicator.rate_limit.rate = float("inf")
    assert a.replicator.wait_idle(20)


def test_a_node_that_hears_of_a_step_too_late_copies_what_it_still_has_of_it(make_node):
    a, b = make_node(0, every_steps=10), make_node(1)
    a.replicator.set_peers({1: b.address})
    for step in range(1, 7):
        for owner in (0, 1):
            a.save(owner, step, content(1000, step))
    a.replicator.ask(6)
    a.replicator.ask(6)
    assert a.replicator.wait_idle(20)
    assert [steps(b.replicas, owner) for owner in (0, 1)] == [[6], [6]]
    assert a.replicator.status()["copies"] == 2


def test_nodes_that_begin_a_generation_together_have_a_step_in_common_wherever_one_is_lost(make_node):
    """One of them has heard of named steps, the other took the place of a lost node and has not."""
    nodes = make_node(0, every_steps=10), make_node(1, every_steps=10)
    nodes[0].replicator.ask(5)
    nodes[0].replicator.ask(30)
    addresses = {node.number: node.address for node in nodes}
    for node in nodes:
        node.replicator.go_by(5)
        node.replicator.set_peers(addresses)
    for step in range(20, 34):
        for node in nodes:
            if step == 21:
                node.replicator.ask(22)
            node.save(node.number, step, content(1000, step))
            assert node.replicator.wait_idle(20)
    mine, its = nodes
    assert 22 in set(steps(mine.own, 0)) & set(steps(mine.replicas, 1))
    assert 22 in set(steps(its.own, 1)) & set(steps(its.replicas, 0))
    for node in nodes:
        node.replicator.go_by(None)
        node.save(node.number, 40, content(1000, 40))
        assert node.replicator.wait_idle(20)
    assert 40 in steps(mine.replicas, 1)


class Told:
    """CpuPriority that counts."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def copy_begins(self) -> None:
        self.said.append("begins")

    def copy_ends(self) -> None:
        self.said.append("ends")


def test_the_copies_of_a_steps_ranks_are_lowered_and_raised_once(pair):
    a, _ = pair
    a.replicator._cpu_priority = told = Told()
    with a.replicator._changed:  # all of them are there before the first is copied
        for owner in range(4):
            a.save(owner, 1, content(1000, owner))
    assert a.replicator.wait_idle(20)
    assert told.said == ["begins", "ends"]
    assert a.replicator.status()["copies"] == 4
