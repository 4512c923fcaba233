"""Pods that ask which node they may be: no two are given the same number while the first is on its way."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from kept_orders import begun, come, handshake_of, train

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.ipc.declared import Address

WAIT_S = 900.0
CONFIG = RuntimeConfig(
    name="a", nodes=4, workers_per_node=1, restart=RestartPolicy(node_wait_s=WAIT_S, quarantine_after=9)
)
A, B, C = ("10.0.1.1", 7), ("10.0.1.2", 7), ("10.0.1.3", 7)


def lose(coordinator: Coordinator, *nodes: int) -> None:
    for node in nodes:
        coordinator.members.leave(node)
        coordinator.actions.carry_out(coordinator.membership.node_lost(node, "its pod is deleted"))


def given(coordinator: Coordinator, wanted: int, by: Address | None, later_s: float = 0.0) -> int | None:
    return coordinator.admission.free_number(wanted, by, time.monotonic() + later_s)


def test_two_pods_that_ask_at_one_time_get_two_numbers(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, _):
            train(coordinator)
            lose(coordinator, 2, 3)
            asked = [coordinator.free_number(0, by) for by in (A, B, C)]
            former = coordinator.members.agents[0]  # whether it is there is not known before it says something

            async def says() -> None:
                former.heard(time.monotonic())

            found = await asyncio.gather(*asked, says())
            assert found[:3] == [2, 3, None]
            assert await coordinator.free_number(2, A) == 2, "whoever asks again gets the same"

    asyncio.run(run())


def test_a_number_is_kept_until_its_pod_has_come_or_so_long_that_another_one_may_still_come(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, _):
            train(coordinator)
            lose(coordinator, 2)
            assert (given(coordinator, 2, A), given(coordinator, 2, B)) == (2, None)
            assert given(coordinator, 2, B, WAIT_S / 2 + 1) == 2, "the first one is lost on its way"
            come(coordinator, handshake_of(2, id="another"))
            assert given(coordinator, 2, C) is None, "it has come"
            lose(coordinator, 2)
            assert given(coordinator, 2, C) == 2

    asyncio.run(run())


def test_a_pod_that_wants_another_number_gives_up_the_first(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, _):
            train(coordinator)
            lose(coordinator, 2, 3)
            assert [given(coordinator, 2, A), given(coordinator, 3, A), given(coordinator, 2, B)] == [2, 3, 2]

    asyncio.run(run())


def test_before_the_job_begins_each_pod_gets_the_number_that_it_wants(tmp_path: Path) -> None:
    """The operator gives each its own. One that was started anew elsewhere wants the same again."""

    async def run() -> None:
        coordinator = Coordinator.first(CONFIG, 0, tmp_path, 1)
        assert [given(coordinator, 2, by) for by in (A, B, None)] == [2, 2, 2]
        coordinator.stop()

    asyncio.run(run())
