"""Parity over a group of nodes, over real sockets: any one node lost is rebuilt bit for bit, and what is not whole
is never taken for a piece."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from peer_node import JOB, Node, content, steps
from waiting import until

from hyperpod_ext.errors import CorruptSnapshotError, NotFoundError
from hyperpod_ext.runtime.memory_server.client.peer_socket import CHUNK
from hyperpod_ext.runtime.memory_server.client.rebuild import Rebuilt
from hyperpod_ext.runtime.memory_server.slots.slots import State
from hyperpod_ext.runtime.snapshot.manifest import check_bytes

WORKERS = 2


def ranks_of(node: int) -> tuple[int, ...]:
    return tuple(range(WORKERS * node, WORKERS * node + WORKERS))


def meet(nodes: list[Node], *, numbers: list[int] | None = None) -> None:
    """All are told who is in the group. `numbers`: the block of ranks that each has."""
    addresses = {node.number: node.address for node in nodes}
    blocks = numbers or [node.number for node in nodes]
    group = {node.number: ranks_of(block) for node, block in zip(nodes, blocks, strict=True)}
    for node in nodes:
        node.replicator.set_peers(addresses, group=group)


def image(rank: int, step: int, nbytes: int = 3000) -> bytes:
    """Shards differ in length from rank to rank."""
    return content(nbytes + 17 * rank, 1000 * step + rank)


def save(nodes: list[Node], step: int, nbytes: int = 3000, generation: int = 1) -> None:
    for node in nodes:
        for rank in ranks_of(node.number):
            node.save(rank, step, image(rank, step, nbytes), generation)


def settled(nodes: list[Node]) -> None:
    for node in nodes:
        assert node.replicator.wait_idle(30), [(each.replicator.status(), each.parts.held()) for each in nodes]


def rebuild(nodes: list[Node], lost: int, save_id: str) -> bytes:
    """The image of a rank, from the nodes of the others of its stripe."""
    others = {rank: node for node in nodes for rank in ranks_of(node.number) if (rank - lost) % WORKERS == 0}
    clients = {rank: node.client() for rank, node in others.items() if rank != lost}
    rebuilt = Rebuilt.open(clients, lost, save_id, job=JOB)
    found = rebuilt.load()
    check_bytes(rebuilt.manifest, found)
    return bytes(found)


def whole(node: Node) -> list[int]:
    """Steps of which this node has a whole piece of each of its ranks."""
    counts = Counter(piece["step"] for piece in node.parts.held())
    return sorted(step for step, count in counts.items() if count == WORKERS)


@pytest.fixture
def make_group(make_node):
    def make(size: int, **options: Any) -> list[Node]:
        nodes = [make_node(number, parity=3, **options) for number in range(size)]
        meet(nodes)
        return nodes

    return make


@pytest.mark.parametrize(("size", "nbytes"), [(3, 1), (4, 3000), (3, 2 * CHUNK + 5), (5, 30_000)])
def test_any_one_node_is_rebuilt_bit_for_bit(make_group, size, nbytes):
    nodes = make_group(size)
    save(nodes, 1, nbytes)
    settled(nodes)
    for lost in nodes:
        others = [node for node in nodes if node is not lost]
        for rank in ranks_of(lost.number):
            assert rebuild(others, rank, "g1-s1") == image(rank, 1, nbytes)
    assert all(node.replicator.status()["replicated_step"] == 1 for node in nodes)
    sent = sum(node.replicator.status()["bytes_sent"] for node in nodes)
    assert sent == sum(len(image(rank, 1, nbytes)) for node in nodes for rank in ranks_of(node.number))
    pieces = [piece for node in nodes for piece in node.parts.held()]
    longest = max(len(image(rank, 1, nbytes)) for node in nodes for rank in ranks_of(node.number))
    assert all(piece["nbytes"] <= longest / (size - 1) + 64 for piece in pieces)
    assert len(pieces) == size * WORKERS


def test_it_goes_by_tls_as_well(make_group):
    nodes = make_group(3, encrypted=True)
    save(nodes, 1)
    settled(nodes)
    assert rebuild(nodes[1:], 0, "g1-s1") == image(0, 1)


def test_a_piece_in_a_slot_that_was_used_before_has_nothing_of_that(make_group):
    nodes = make_group(3)
    for step in (1, 2, 3):
        save(nodes, step, 3000 - step)
        settled(nodes)
    assert [whole(node) for node in nodes] == [[2, 3]] * 3
    assert rebuild(nodes[1:], 0, "g1-s3") == image(0, 3, 2997)
    assert rebuild(nodes[1:], 0, "g1-s2") == image(0, 2, 2998)


def test_a_piece_counts_only_when_the_parts_of_all_others_have_come(make_group):
    nodes = make_group(3)
    save(nodes, 1)
    settled(nodes)
    save(nodes[:2], 2)
    until(lambda: all(node.replicator.status()["bytes_sent"] > 2 * len(image(0, 1)) for node in nodes[:2]))
    # node 2 has both parts of step 2; of the other pieces its own parts are missing
    until(lambda: whole(nodes[2]) == [1, 2])
    assert [whole(node) for node in nodes[:2]] == [[1], [1]]
    assert not nodes[0].replicator.wait_idle(0)
    assert rebuild([nodes[0], nodes[2]], 2, "g1-s1") == image(2, 1)
    save(nodes[2:], 2)
    settled(nodes)
    assert rebuild([nodes[0], nodes[2]], 2, "g1-s2") == image(2, 2)


def test_a_snapshot_stays_until_the_group_has_another_step_whole(make_group):
    """As long as node 2 has not sent its parts of step 5, step 1 is what all could have without one of them."""
    nodes = make_group(3, every_steps=4)
    for step in (4, 5, 6, 7):
        save(nodes, step)
    settled(nodes)
    save(nodes[:2], 8)
    until(lambda: whole(nodes[2]) == [4, 8])
    for step in (9, 10, 11):
        save(nodes[:2], step)
    assert all(4 in steps(node.own, WORKERS * node.number) for node in nodes)
    assert all(8 in steps(node.own, WORKERS * node.number) for node in nodes[:2])
    save(nodes[2:], 8)
    settled(nodes)
    save(nodes, 13)
    assert [4 in steps(node.own, WORKERS * node.number) for node in nodes] == [False] * 3
    assert all(8 in steps(node.own, WORKERS * node.number) for node in nodes)


def test_a_rank_keeps_its_snapshot_until_the_others_of_its_node_are_done_with_the_next(make_group):
    """Else all could have of the first ranks but step 8, and of the second ranks but step 4."""
    nodes = make_group(3, every_steps=4)
    save(nodes, 4)
    settled(nodes)
    for rank in (0, 2, 4, 1, 3):  # rank 5 is late with its save
        nodes[rank // WORKERS].save(rank, 8, image(rank, 8))
    for rank in (0, 2, 4):
        assert nodes[rank // WORKERS].own.wait_state(rank, "g1-s8", State.REPLICATED, 30)
    for step in (9, 10, 11):
        for rank in (0, 2, 4):
            nodes[rank // WORKERS].save(rank, step, image(rank, step))
    assert all({4, 8} <= set(steps(nodes[rank // WORKERS].own, rank)) for rank in (0, 2, 4))
    assert rebuild(nodes[:2], 4, "g1-s4") == image(4, 4)
    nodes[2].save(5, 8, image(5, 8))
    settled(nodes)
    for step in (13, 14, 15):
        save(nodes, step)
    assert not any(4 in steps(nodes[rank // WORKERS].own, rank) for rank in range(6))


def test_a_step_that_one_node_leaves_out_is_given_up_for_the_next(make_group):
    nodes = make_group(3)
    save(nodes, 1)
    settled(nodes)
    save(nodes[:2], 2)
    save(nodes[2:], 3)
    save(nodes[:2], 3)
    settled(nodes)
    assert [whole(node)[-1] for node in nodes] == [3, 3, 3]
    assert rebuild(nodes[:2], 4, "g1-s3") == image(4, 3)
    with pytest.raises(NotFoundError):
        rebuild(nodes[:2], 4, "g1-s2")


def test_a_node_that_takes_the_place_of_a_lost_one_makes_the_group_whole_with_the_next_step(make_node, make_group):
    nodes = make_group(3)
    save(nodes, 1)
    settled(nodes)
    nodes[1].close()
    other = make_node(7, parity=3)
    after = [nodes[0], other, nodes[2]]
    meet(after, numbers=[0, 1, 2])
    for node, block in zip(after, (0, 1, 2), strict=True):
        for rank in ranks_of(block):
            node.save(rank, 2, image(rank, 2), generation=2)
    settled(after)
    held = {rank: node for node, block in zip(after, (0, 1, 2), strict=True) for rank in ranks_of(block)}
    clients = {rank: held[rank].client() for rank in (0, 2)}
    rebuilt = Rebuilt.open(clients, 4, "g2-s2", job=JOB)
    assert bytes(rebuilt.load()) == image(4, 2)
    assert rebuild([nodes[0], nodes[2]], 2, "g1-s1") == image(2, 1)  # by the pieces of before, until they are replaced


def test_a_node_lost_in_the_middle_gives_the_step_up_and_nothing_else(make_node, make_group):
    nodes = make_group(3)
    save(nodes, 1)
    settled(nodes)
    save(nodes[:2], 2)
    until(lambda: whole(nodes[2]) == [1, 2])
    nodes[2].close()
    meet([*nodes[:2], make_node(7, parity=3)], numbers=[0, 1, 2])
    settled(nodes[:2])  # nobody waits for what does not come
    assert [whole(node) for node in nodes[:2]] == [[1], [1]]


def test_what_never_comes_is_waited_for_no_longer_than_its_timeout(make_group):
    nodes = make_group(3, parts_timeout_s=0.3)
    save(nodes[:1], 1)
    settled(nodes)
    assert nodes[0].replicator.status()["superseded"] == WORKERS
    assert [whole(node) for node in nodes] == [[], [], []]


def test_a_newer_generation_gives_up_what_an_earlier_one_had_begun(make_group):
    nodes = make_group(3)
    save(nodes[:2], 5)
    until(lambda: whole(nodes[2]) == [5])
    for node in nodes:
        node.own.fence(2, 4)
        node.parts.fence(2, 4)
    assert [whole(node) for node in nodes] == [[], [], []]
    save(nodes, 5, generation=2)
    settled(nodes)
    assert rebuild(nodes[1:], 0, "g2-s5") == image(0, 5)


@pytest.mark.parametrize("where", ["piece", "image"])
def test_a_bit_that_has_flipped_is_found_by_the_lost_ranks_own_manifest(make_group, where):
    nodes = make_group(3)
    save(nodes, 1)
    settled(nodes)
    regions = nodes[1].pieces if where == "piece" else nodes[1].own
    with regions.pin(2, "g1-s1", "damage") as pin:
        pin.data[7] ^= 1
    with pytest.raises(CorruptSnapshotError, match="CRC64-NVME"):
        rebuild(nodes[1:], 0, "g1-s1")


def test_a_snapshot_that_is_damaged_before_it_is_sent_spoils_no_piece(make_group):
    nodes = make_group(3, every_steps=2)
    save(nodes, 1)
    with nodes[0].own.pin(0, "g1-s1", "damage") as pin:
        pin.data[7] ^= 1
    for node in nodes:
        node.replicator.ask(1)
    until(lambda: nodes[0].replicator.status()["failed"] == 1)
    assert "CRC64-NVME" in nodes[0].replicator.status()["last_error"]


def test_the_parts_of_ranks_of_other_nodes_are_refused(make_node, make_group):
    nodes = make_group(3)
    stranger = make_node(9, parity=3)
    meet([nodes[0], nodes[1], stranger], numbers=[0, 1, 9])
    meet(nodes)
    stranger.save(18, 1, image(18, 1))
    until(lambda: stranger.replicator.status()["superseded"] == 1)
    assert [whole(node) for node in nodes] == [[], [], []]


def test_a_node_without_parity_says_so(make_node):
    a, b = make_node(0), make_node(1)
    with pytest.raises(NotFoundError, match="keeps no parity"):
        b.client().open_piece(0, "g1-s1", 1, job=JOB)
    a.replicator.set_peers({0: a.address, 1: b.address})
    a.save(0, 1, b"x")
    assert a.replicator.wait_idle(20)
    assert steps(b.replicas) == [1]
