"""Processes that end on their way out of a generation that a fault has ended: they are no faults of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kept_orders import Sent, begun, come, handshake_of, join, take, train

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.ipc import control_messages as c

EACH = 8
CONFIG = RuntimeConfig(name="a", nodes=2, workers_per_node=EACH)


def died(rank: int, generation: int, joined: int) -> c.Died:
    """As an agent says it that has heard of `generation`, of a process that had asked to join `joined`."""
    return c.Died(
        rank=rank, generation=generation, joined=joined, cause="killed by SIGKILL (9)", step=1, kind="signal", phase="",
        place="", exit_code=-9, final=False, hint="", t=0.0,
    )  # fmt: skip


def started(line: Sent) -> list[int]:
    return [order.rank for order in line.of(c.StartWorker)]


def test_those_that_follow_a_fault_count_for_no_budget(tmp_path: Path) -> None:
    """NCCL may end all processes of a set-up in which one has died: that used up a job's restarts at once."""

    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, lines):
            join(coordinator, *range(2 * EACH))
            begins = [len(started(lines[node])) for node in (0, 1)]
            take(coordinator, 1, died(2 * EACH - 1, 1, 1))
            for rank in range(2 * EACH - 1):
                take(coordinator, rank // EACH, died(rank, 2, 1))
            assert not coordinator.ended.done()
            faults = coordinator.membership.faults
            assert [fault.rank for fault in faults if not fault.follows] == [2 * EACH - 1]
            assert [started(lines[node])[begin:] for node, begin in enumerate(begins)] == [
                list(range(EACH)),
                [2 * EACH - 1, *range(EACH, 2 * EACH - 1)],
            ], "each is replaced all the same"

    asyncio.run(run())


@pytest.mark.parametrize("joined", [0, 2])
def test_a_new_process_that_dies_is_a_fault_of_its_own(tmp_path: Path, joined: int) -> None:
    """Whether it had come as far as to wait for the next generation or not."""

    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, _):
            join(coordinator, *range(2 * EACH))
            take(coordinator, 0, died(3, 1, 1))
            take(coordinator, 0, died(3, 2, joined))
            assert [fault.rank for fault in coordinator.membership.faults if not fault.follows] == [3, 3]

    asyncio.run(run())


def test_a_process_that_joined_before_its_agent_knew_the_generation_is_missed_by_all(tmp_path: Path) -> None:
    """That of a node that came while the generation formed, or the first of a job that is started again."""

    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, lines):
            train(coordinator)
            take(coordinator, 0, died(3, 1, 1))
            train(coordinator)
            take(coordinator, 1, died(EACH, 2, 1))
            assert [order.generation for order in lines[0].of(c.AbortGeneration)] == [2, 3]
            assert [fault.rank for fault in coordinator.membership.faults if not fault.follows] == [3, EACH]

    asyncio.run(run())


def test_a_node_that_comes_while_a_generation_forms_is_told_which(tmp_path: Path) -> None:
    """Else a process of it that dies at once was of a generation that a fault has ended: it is replaced for ever."""

    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, _):
            train(coordinator)
            coordinator.lost_nodes.lose(1, "its pod is deleted")
            line = come(coordinator, handshake_of(1, id="another"))
            orders = [order for order in line.orders if isinstance(order, c.AbortGeneration | c.StartWorker)]
            assert [type(order) for order in orders] == [c.AbortGeneration] + EACH * [c.StartWorker]
            assert line.of(c.AbortGeneration)[0].generation == 2
            assert [type(order) for order in line.orders].index(c.JobNews) < line.orders.index(orders[0])

    asyncio.run(run())
