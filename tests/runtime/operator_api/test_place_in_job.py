"""Where a pod that is started finds its job: among many that are new, and beside one of another version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.ports import free_port
from hyperpod_ext.runtime.agent.election import ElectionListener
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.operator_api import place_in_job
from hyperpod_ext.runtime.operator_api.place_in_job import JobSucceededError, find_place

SECRET = b"0123456789abcdef"


@asynccontextmanager
async def one_that_knows() -> AsyncIterator[tuple[str, int]]:
    """Address of an agent that has seen the job's end."""
    listener = ElectionListener(SECRET, pytest.fail, succeeded=True)
    await listener.open("127.0.0.1", 0)
    yield listener.address
    await listener.close()


def settings_in(folder: Path) -> NodeSettings:
    config = RuntimeConfig(name="a", nodes=32, workers_per_node=1)
    return NodeSettings(config, 0, "127.0.0.1", 9, ["a.py"], folder, folder, folder / "secret", SECRET)


@pytest.mark.parametrize(("faults", "finds"), [(1, True), (0, False)])
def test_after_a_fault_all_are_asked_before_a_job_is_begun(tmp_path: Path, faults: int, finds: bool) -> None:
    """A rack may be lost, and its pods be new."""

    async def run() -> bool:
        async with one_that_knows() as place:
            new = [("127.0.0.1", free_port()) for _ in range(30)]
            try:
                found = await find_place(settings_in(tmp_path), [*new, place], 60.0, lambda: True, faults=faults)
            except JobSucceededError:
                return True
        assert found is None
        return False

    assert asyncio.run(run()) == finds


def test_who_speaks_another_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with one_that_knows() as place:
            monkeypatch.setattr(place_in_job, "with_version", lambda message: {**message, "protocol": 0})
            await find_place(settings_in(tmp_path), [place], 60.0, lambda: True)

    with pytest.raises(JobFailedError, match=r"the agent at 127\.0\.0\.1 refused this agent: .*version"):
        asyncio.run(run())
