"""Parts of a node alone: its supervisors, its reports, the operator's orders, and its leadership."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.runtime.agent import supervisors
from hyperpod_ext.runtime.agent.children import ForkServerEndedError
from hyperpod_ext.runtime.agent.election import Leadership
from hyperpod_ext.runtime.agent.orders import Operator
from hyperpod_ext.runtime.agent.reports import NodeReports
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.agent.supervisors import ForkSupervisor, RestartLimit
from hyperpod_ext.runtime.ipc import control_messages as c

NEWS = c.JobNews(
    term=1, coordinator=0, candidates={}, members=2, master_port=1, world_size=2, nodes=2, moved_in=0, spares=False,
    servers_lost=0,
)  # fmt: skip


class Client:
    """The connection to a coordinator, which has news for this node."""

    def __init__(self, *, connected: bool = True) -> None:
        self.connected = self.has_coordinator = connected
        self.news, self.sent, self.gone = NEWS, list[Any](), list[Any]()

    def send(self, report: Any) -> None:
        self.sent.append(report)

    def know_gone(self, hosts: Any, *, replaced: bool) -> None:
        self.gone.append((list(hosts), replaced))


def reports_to(client: Any) -> NodeReports:
    return NodeReports(1, client, lambda: 7)


def settings_in(folder: Path, **more: Any) -> NodeSettings:
    config = RuntimeConfig(name="a", nodes=2, workers_per_node=1)
    return NodeSettings(config, 1, "h", 9, ["train.py"], folder, folder, folder / "secret", b"secret", **more)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([3, 4, 5], "; 3 times in a row, and the limit is 2 (restart.max_on_node)"),
        ([3, 4, 14, 15, 25], "; 5 times, and the limit is 4 (restart.max_restarts)"),
        ([3, 4, 14, 15], ""),
    ],
)
def test_a_helper_process_may_end_so_often_in_a_row_and_in_all(steps: list[int], why: str) -> None:
    limit = RestartLimit(RestartPolicy(max_on_node=2, max_restarts=4, calm_steps=10))
    *earlier, last = [limit.count(step) for step in steps]
    assert (set(earlier), last) == ({""}, why)


def test_a_task_that_fails_is_reported_as_the_failure_of_the_node() -> None:
    async def fail() -> None:
        raise ValueError("no such thing")

    async def run(client: Client) -> str:
        reports = reports_to(client)
        reports.spawn(fail())
        while not client.sent and not reports.broken.done():
            await asyncio.sleep(0)
        return reports.why_broken()

    connected = Client()
    assert asyncio.run(asyncio.wait_for(run(connected), 60)) == "", "the coordinator decides"
    (report,) = connected.sent
    assert report == c.NodeBroken(cause="no such thing", code="JobFailedError", lost=False, generation=7)
    assert asyncio.run(asyncio.wait_for(run(Client(connected=False)), 60)) == "no such thing"


def test_another_coordinator_gets_the_newest_order_of_the_operator_once() -> None:
    async def run() -> list[Any]:
        client: Any = Client()
        unused: Any = None
        operator = Operator(client, unused, unused, reports_to(client))
        operator.repeat(NEWS)
        operator.hold()
        operator.repeat(NEWS)
        operator.resume(1, ["10.0.0.2"])
        for term in (1, 2, 2):
            operator.repeat(NEWS.model_copy(update={"term": term}))
        assert client.gone == [(["10.0.0.2"], False)]
        return [type(report) for report in client.sent]

    assert asyncio.run(run()) == [c.HoldTraining] * 2 + [c.ResumeTraining] * 2


def test_a_worker_whose_fork_server_ends_is_forked_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Any] = []

    class Server:
        pid, is_ready, notes = 1, True, ()

        def __init__(self, *_: object) -> None: ...

        async def connect(self, environ: object) -> None: ...

        async def ready(self) -> float:
            return 0.0

    monkeypatch.setattr(supervisors, "ForkServer", Server)
    monkeypatch.setattr(supervisors, "on_exit", lambda pid, tell: ends.append(tell))

    async def run() -> list[str]:
        client, used = Client(), list[object]()
        workers: Any = SimpleNamespace(newest_step=5)

        async def mend() -> None: ...

        async def start(server: object) -> None:
            used.append(server)
            if len(used) == 1:
                ends[0](9)
                raise ForkServerEndedError("it ended")

        forks = ForkSupervisor(settings_in(tmp_path), workers, reports_to(client), mend)
        await forks.start()
        forks.fork_after(forks.wait_imported())
        await forks.fork(start)
        first, second = used
        assert first is not second
        return [report.event for report in client.sent]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == ["imported", "fork_server_lost", "imported"]


def test_a_node_that_joins_later_finds_the_coordinator_in_the_run_directory(tmp_path: Path) -> None:
    async def run() -> None:
        assert Leadership(settings_in(tmp_path)).endpoint() == ("h", 9)
        late = Leadership(settings_in(tmp_path, rejoin=True))
        assert late.endpoint() == ("h", 9), "nobody has written it yet"
        (tmp_path / "coordinator.json").write_text(json.dumps({"address": ["10.0.0.3", 5]}))
        assert late.endpoint() == ("10.0.0.3", 5)
        others = Leadership(settings_in(tmp_path, others=(("a", 1), ("b", 2))))
        assert [others.endpoint() for _ in range(3)] == [("a", 1), ("b", 2), ("a", 1)]

    asyncio.run(run())
