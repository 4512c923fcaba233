"""All nodes of a large job come to another coordinator in one moment: what that costs does not grow with its square."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kept_orders import Sent, come

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.coordinator.outbox import Outbox
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.membership.candidates import CANDIDATES

WORKERS = 2


def config_of(nodes: int) -> RuntimeConfig:
    tiers = (MemoryTier(), PeerTier(every_steps=1))
    return RuntimeConfig(name="a", nodes=nodes, workers_per_node=WORKERS, checkpoint=CheckpointPolicy(tiers=tiers))


def handshake_of(node: int, job_state: dict[str, Any] | None = None, *, trains: bool = True) -> c.AgentHandshake:
    ranks = range(node * WORKERS, (node + 1) * WORKERS) if trains else ()
    workers = {rank: c.RunningWorker(pid=1 + rank, step=3, joining=False) for rank in ranks}
    return c.AgentHandshake(
        node=node, id=f"agent {node}", pid=1, peer=("10.0.0.1", 1 + node), address=("10.0.0.2", 1 + node),
        domain=f"rack {node // 16}", generation=1, workers=workers, committed=2 if trains else 0, exited={},
        term=1 if trains else 0, job_state=job_state,
    )  # fmt: skip


async def taken_back(nodes: int, folder: Path) -> tuple[int, dict[int, Sent]]:
    """How often the job state was made of all nodes for it, and what each was sent."""
    first = Coordinator.first(config_of(nodes), 0, folder, 1)
    for node in range(nodes):
        come(first, handshake_of(node, trains=False))
    job_state = json.loads(json.dumps(first.job.outbox._make_job_state() | {"number": 1}))
    first.stop()
    made = 0
    make = Outbox._make_job_state

    def counted(outbox: Outbox) -> dict[str, Any]:
        nonlocal made
        made += 1
        return make(outbox)

    successor = Coordinator.successor(config_of(nodes), 1, folder, handshake_of(1, job_state), [])
    with mock.patch.object(Outbox, "_make_job_state", counted):
        lines = {node: come(successor, handshake_of(node)) for node in range(1, nodes)}
        await asyncio.sleep(0)  # what is soon to be done
    successor.stop()
    return made, lines


@pytest.mark.parametrize("nodes", [40, 160])
def test_all_nodes_of_a_job_are_taken_back_at_the_cost_of_a_few(tmp_path: Path, nodes: int) -> None:
    made, lines = asyncio.run(taken_back(nodes, tmp_path))
    assert made <= CANDIDATES + 4
    with_state = 0
    for node, line in lines.items():
        news = [order for order in line.orders if isinstance(order, c.JobNews)]
        assert isinstance(line.orders[0], c.JobNews | c.JobState), "the first word is that of a coordinator"
        assert (news[-1].term, news[-1].coordinator, news[-1].members) == (2, 1, nodes - 1)
        (assignment,) = (order for order in line.orders if isinstance(order, c.NodeAssignment))
        assert assignment.ranks == tuple(range(node * WORKERS, (node + 1) * WORKERS))
        assert [order.generation for order in line.orders if isinstance(order, c.AbortGeneration)] == [2]
        with_state += any(isinstance(order, c.JobState) for order in line.orders)
    assert CANDIDATES <= with_state <= CANDIDATES + 1
