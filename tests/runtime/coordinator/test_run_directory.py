"""A run directory that takes no writes: the job goes on, and whoever reads stderr hears of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kept_orders import begun, handshake_of, train

from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.resize import WANTED
from hyperpod_ext.runtime.agent.election import Leadership
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.ipc import control_messages as c

CONFIG = RuntimeConfig(
    name="a", nodes=2, workers_per_node=1, spares=1, elastic=Elastic(min_nodes=1, max_nodes=3), global_batch_size=6
)


def test_a_job_whose_wish_for_nodes_cannot_be_written_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / WANTED).mkdir()

    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (coordinator, lines):
            train(coordinator)
            coordinator.actions._want_nodes(3)
            coordinator.actions._release((2,))
            assert lines[1].of(c.MembersReleased), "what comes after it is done"
            assert not coordinator.ended.done()

    asyncio.run(run())
    assert capsys.readouterr().err.count(f"{tmp_path / WANTED} cannot be written") == 2


def test_a_coordinator_takes_over_where_nothing_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the loss of a coordinator would be that of the job."""
    gone = tmp_path / "gone"

    async def run() -> None:
        async with begun(CONFIG, tmp_path) as (first, _):
            job_state = first.job.outbox._make_job_state() | {"number": 1}
        settings = NodeSettings(
            CONFIG, 1, "127.0.0.1", 0, ["a.py"], gone, tmp_path, tmp_path / "secret", b"the secret of this test"
        )
        leadership = Leadership(settings)
        own = handshake_of(1, job_state=job_state, term=1)
        leadership.take_over(own, [handshake_of(2, job_state=job_state, term=1)], frozenset())
        made = leadership.coordinator
        assert isinstance(made, Coordinator)
        assert set(made.members.members) == {1, 2}
        made.stop()

    asyncio.run(run())
    assert f"{gone / 'coordinator.json'} cannot be written" in capsys.readouterr().err
