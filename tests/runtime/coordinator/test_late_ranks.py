"""A generation that does not form: whose fault that is, and how long each has for it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from kept_orders import Sent, begun, come, handshake_of, join, take

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.membership.actions import EscalationLevel, Fault

EACH = 8
LIMIT_S = 600.0


def config_of(*, spares: int = 0, nodes: int = 2, **policy: int) -> RuntimeConfig:
    restart = RestartPolicy(form_timeout_s=LIMIT_S, **policy)
    return RuntimeConfig(name="a", nodes=nodes, workers_per_node=EACH, spares=spares, restart=restart)


def late(coordinator: Coordinator, times: int = 1) -> list[Fault]:
    """The time is over, so often; what that costs."""
    before = len(coordinator.membership.faults)
    for time_over in range(1, times + 1):
        coordinator.reports.late_ranks(time.monotonic() + time_over * 2 * LIMIT_S)
    return coordinator.membership.faults[before:]


def counted(faults: list[Fault]) -> list[tuple[int, EscalationLevel | None]]:
    return [(fault.rank, fault.level) for fault in faults if not fault.follows]


def started(line: Sent) -> list[int]:
    return [order.rank for order in line.of(c.StartWorker)]


def test_the_ranks_of_a_slow_node_are_one_fault_and_each_is_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(config_of(), tmp_path) as (coordinator, lines):
            join(coordinator, *range(EACH))
            faults = late(coordinator)
            assert counted(faults) == [(EACH, EscalationLevel.PROCESS)]
            assert [fault.rank for fault in faults] == list(range(EACH, 2 * EACH)), "each is named"
            assert started(lines[1]) == 2 * list(range(EACH, 2 * EACH))

    asyncio.run(run())


def test_two_slow_nodes_are_two_faults_and_end_no_job(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(config_of(), tmp_path) as (coordinator, _):
            assert counted(late(coordinator)) == [(0, EscalationLevel.PROCESS), (EACH, EscalationLevel.PROCESS)]
            assert not coordinator.ended.done()

    asyncio.run(run())


@pytest.mark.parametrize("spares", [1, 2])
def test_a_spare_that_has_just_got_the_ranks_of_a_slow_node_is_not_blamed_for_them(tmp_path: Path, spares: int) -> None:
    async def run() -> None:
        async with begun(config_of(spares=spares, max_on_node=1), tmp_path) as (coordinator, lines):
            join(coordinator, *range(EACH))
            faults = late(coordinator, times=2)
            assert counted(faults) == [(EACH, EscalationLevel.PROCESS), (EACH, EscalationLevel.NODE)]
            assert {fault.node for fault in faults} == {1}
            assert started(lines[2]) == list(range(EACH, 2 * EACH)), "each is started there once"

    asyncio.run(run())


ALMOST_S = LIMIT_S - 5.0


def is_blamed_soon(coordinator: Coordinator) -> bool:
    """Whether a rank is late ten seconds from now."""
    before = len(coordinator.membership.faults)
    coordinator.reports.late_ranks(time.monotonic() + 10.0)
    return len(coordinator.membership.faults) > before


@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_that_gets_ranks_while_a_generation_forms_has_the_whole_time_for_it(tmp_path: Path, spares: int) -> None:
    async def run() -> None:
        async with begun(config_of(spares=spares), tmp_path) as (coordinator, lines):
            join(coordinator, *range(EACH))
            coordinator.job.formation.since = time.monotonic() - ALMOST_S
            coordinator.lost_nodes.lose(1, "its pod is deleted")
            if not spares:
                lines[1] = come(coordinator, handshake_of(1, id="another"))
            assert started(lines[2 if spares else 1]) == list(range(EACH, 2 * EACH))
            assert not is_blamed_soon(coordinator)

    asyncio.run(run())


def test_a_process_that_is_replaced_while_a_generation_forms_has_the_whole_time_for_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(config_of(), tmp_path) as (coordinator, lines):
            join(coordinator, *range(2 * EACH - 1))
            coordinator.job.formation.since = time.monotonic() - ALMOST_S
            last = 2 * EACH - 1
            take(coordinator, 1, died(last))
            assert started(lines[1])[-2:] == [last, last]
            assert not is_blamed_soon(coordinator)

    asyncio.run(run())


def test_one_that_does_not_come_is_late_though_others_join(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(config_of(), tmp_path) as (coordinator, _):
            coordinator.job.formation.since = time.monotonic() - ALMOST_S
            join(coordinator, *range(2 * EACH - 1))
            assert is_blamed_soon(coordinator)

    asyncio.run(run())


def died(rank: int) -> c.Died:
    return c.Died(
        rank=rank,
        generation=1,
        cause="killed by SIGKILL (9)",
        step=1,
        kind="signal",
        phase="",
        place="",
        exit_code=-9,
        final=False,
        hint="",
        t=0.0,
    )
