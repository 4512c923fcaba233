"""A node whose line ends for a moment, and whose coordinator is still the same: what it said meanwhile is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from kept_orders import Sent, begun, come, handshake_of, join, take, train

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.membership.actions import JobPhase
from hyperpod_ext.runtime.membership.node_states import NodeState, Why

CONFIG = RuntimeConfig(name="a", nodes=3, workers_per_node=1, spares=1)


def cut_off(coordinator: Coordinator, node: int, **said: Any) -> Sent:
    """It is not counted as lost, and comes again."""
    coordinator.members.doubt(node, "its connection closed", time.monotonic() + 60.0)
    return come(coordinator, handshake_of(node, term=1, generation=coordinator.membership.generation, **said))


@pytest.mark.parametrize("nodes", [1, 3])
def test_all_ranks_meet_anew_and_no_more_than_once(tmp_path: Path, nodes: int) -> None:
    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, lines):
            train(coordinator)
            before = len(lines[0].of(c.AbortGeneration))
            for node in range(nodes):
                coordinator.members.doubt(node, "its connection closed", time.monotonic() + 60.0)
            for node in range(nodes):
                working = {node: c.RunningWorker(pid=1, step=3)}
                lines[node] = come(coordinator, handshake_of(node, term=1, generation=1, workers=working))
            assert coordinator.membership.generation == 2
            for node in range(nodes):
                assert {order.generation for order in lines[node].of(c.AbortGeneration)} == {2}
                assert lines[node].of(c.StartWorker) == [], "its process is there"
            assert before == 0
            train(coordinator)
            assert coordinator.membership.phase is JobPhase.RUNNING

    asyncio.run(run())


def test_a_node_that_has_given_up_its_ranks_is_asked_again_what_its_memory_holds(tmp_path: Path) -> None:
    """Else no generation would begin."""

    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, _):
            train(coordinator)
            membership = coordinator.membership
            membership.nodes = {**membership.nodes, 1: 3}
            membership.states.set_state(3, NodeState.MEMBER)
            membership.states.set_state(1, NodeState.DECOMMISSIONED, Why.FAILED)
            coordinator.actions.carry_out([membership._leave()])
            line = cut_off(coordinator, 1)
            assert line.of(c.DecommissionNode)
            join(coordinator)
            assert membership.phase is JobPhase.FORMING
            take(coordinator, 1, c.Decommissioned(held=(), pieces=()))
            assert membership.phase is JobPhase.RESTORING

    asyncio.run(run())


def test_a_node_that_has_said_what_its_memory_holds_is_not_asked_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, _):
            line = cut_off(coordinator, 3)
            assert line.of(c.DecommissionNode) == line.of(c.EndWorkers) == []

    asyncio.run(run())
