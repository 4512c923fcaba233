"""A snapshot of which its rank has not said yet whether it is whole goes nowhere, whatever becomes of other nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from served import JOB, SECRET, plan_of

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
from hyperpod_ext.runtime.memory_server.protocol.requests import SaveRecord
from hyperpod_ext.runtime.memory_server.state import NodeMemory
from hyperpod_ext.runtime.snapshot.manifest import save_id_of

NBYTES = 1000
PLAN = plan_of(NBYTES)


@pytest.fixture
def make_memory() -> Iterator[Callable[[int], NodeMemory]]:
    """Makes nodes of a job, whose copies on peers are seldom due."""
    made: list[NodeMemory] = []

    def make(number: int) -> NodeMemory:
        policy = CheckpointPolicy(tiers=(MemoryTier(), PeerTier(every_steps=1000)))
        memory = NodeMemory(
            policy, job=JOB, secret=SECRET, node=number, nodes=3, owners=1, usable_bytes=lambda: 1 << 30
        )
        memory.plans.add(PLAN.to_json(), PLAN.digest)
        made.append(memory)
        return memory

    yield make
    for memory in made:
        for part in (memory.replicator, memory.peer_server):
            if part is not None:
                part.close()


def save(memory: NodeMemory, step: int, *, provisional: bool) -> None:
    os.close(memory.map(0, NBYTES)[1])
    slot = memory.own.next_slot(0)
    assert slot is not None
    memory.begin(0, slot, step, save_id_of(1, step), 1)
    record = {"save_id": save_id_of(1, step), "world_size": 1, "own_digest": "", "extras": {}, "saved_at": 0.0}
    record |= {"plan": PLAN.digest, "nbytes": NBYTES, "values": [step], "provisional": provisional}
    memory.seal(0, slot, SaveRecord.model_validate(record))


@pytest.mark.parametrize("ask", ["set_peers", "replicate_now"])
def test_the_newest_that_is_certain_is_copied(make_memory, ask):
    one, other = make_memory(0), make_memory(1)
    peers = {1: ("127.0.0.1", other.listen("127.0.0.1"))}
    if ask == "replicate_now":
        one.set_peers(peers, {})
    save(one, 6, provisional=False)
    save(one, 7, provisional=True)
    if ask == "replicate_now":
        one.replicate_now()
    else:
        one.set_peers(peers, {})
    assert one.wait_idle(20)
    one.resolve(0, save_id_of(1, 7), keep=False)
    assert [held["step"] for held in other.replicas.held()] == [6]


@pytest.mark.parametrize("before", [True, False])
def test_once_it_is_certain_it_is_copied_too(make_memory, before):
    """It is not due; but those of the other ranks of this node, which were quicker, may be there already."""
    one, other = make_memory(0), make_memory(1)
    if before:
        save(one, 6, provisional=False)
    save(one, 7, provisional=True)
    one.set_peers({1: ("127.0.0.1", other.listen("127.0.0.1"))}, {})
    assert one.wait_idle(20)
    one.resolve(0, save_id_of(1, 7), keep=True)
    assert one.wait_idle(20)
    save(one, 8, provisional=False)
    assert one.wait_idle(20)
    assert [held["step"] for held in other.replicas.held()] == [6, 7][not before :]
