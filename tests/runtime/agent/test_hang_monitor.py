"""When an agent looks for workers that make no progress."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyperpod_ext.config.detection import HangPolicy
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.runtime.agent import hang_monitor
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.detection.heartbeat import HeartbeatPage, Phase
from hyperpod_ext.runtime.ipc import control_messages as c

LIMIT_S = 0.3


def test_a_rank_that_has_used_up_its_time_is_told_of_then_and_not_at_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only the agent's waiting moves."""
    began = time.monotonic()
    clock, told = [began], list[float]()

    async def sleep(seconds: float) -> None:
        clock[0] += seconds
        if told or clock[0] > began + 10:
            raise asyncio.CancelledError

    monkeypatch.setattr(hang_monitor, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(hang_monitor, "asyncio", SimpleNamespace(sleep=sleep))
    policy = HangPolicy(floor_s=LIMIT_S, first_step_s=LIMIT_S)
    config = RuntimeConfig(name="a", nodes=1, workers_per_node=1, restart=RestartPolicy(hang=policy))

    def tell(_: object) -> None:
        told.append(clock[0])

    settings = NodeSettings(config, 0, "", 1, ["train.py"], tmp_path, tmp_path, tmp_path / "secret", b"secret")
    workers = dict[int, hang_monitor.MonitoredWorker]()
    monitor = hang_monitor.HangMonitor(settings, lambda: workers, tell, lambda *_, **__: None)
    page = monitor.new_page()
    workers[0] = hang_monitor.MonitoredWorker(pid=os.getpid(), log=tmp_path / "log", heartbeat=page)
    page.mark(Phase.DATA)
    page.beat(0)
    quiet_since = page.read().marked_at
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(monitor.run())
    (at,) = told
    assert LIMIT_S < at - quiet_since < LIMIT_S + 0.05


def test_the_first_unprotected_step_of_a_node_is_logged_once_and_before_the_end_of_its_process(tmp_path: Path) -> None:
    logged = list[dict[str, object]]()
    config = RuntimeConfig(name="a", nodes=1, workers_per_node=2)
    settings = NodeSettings(config, 0, "", 1, ["train.py"], tmp_path, tmp_path, tmp_path / "secret", b"secret")
    monitor = hang_monitor.HangMonitor(
        settings, dict, lambda _: None, lambda event, **fields: logged.append({"event": event, **fields})
    )
    pages = [monitor.new_page(), monitor.new_page()]
    monitor.see_report(c.Exited(rank=2, code=0))
    assert logged == []
    for rank, page in enumerate(pages, start=2):
        HeartbeatPage.of(page.path).report_unprotected(rank)
    monitor.see_report(c.Exited(rank=3, code=0))
    monitor.see_report(c.Exited(rank=2, code=0))
    _, when = pages[0].unprotected or (0, 0.0)
    assert logged == [{"event": "unprotected_step", "rank": 2, "t": when}]
    assert when <= time.monotonic()
