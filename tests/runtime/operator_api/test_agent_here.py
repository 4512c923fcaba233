"""This node's agent beside what serves the operator: a pod that is told to end does so, whatever its job is at."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, until

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.operator_api import agent_here
from hyperpod_ext.runtime.operator_api.agent_here import AgentHere
from hyperpod_ext.runtime.operator_api.states import NodeStart


class Stays:
    """A node whose job goes on until it is told how it ends."""

    why_failed = ("", "")

    def __init__(self) -> None:
        self.asked, self.runs = threading.Event(), threading.Event()
        self.ends: asyncio.Future[str]

    async def run(self) -> str:
        self.loop = asyncio.get_running_loop()
        self.ends = self.loop.create_future()
        self.runs.set()
        return await self.ends

    def ask_to_end(self) -> None:
        self.asked.set()

    def end(self, how: str | Exception) -> None:
        set_it = self.ends.set_exception if isinstance(how, Exception) else self.ends.set_result
        self.loop.call_soon_threadsafe(set_it, how)


class Heard:
    """What the operator would be told."""

    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []

    def job_ended(self, **how: Any) -> None:
        self.ended.append(how)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of this process, as they were."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def run_to_its_end(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    then: Callable[[AgentHere, Stays], object],
    *,
    policy: str = "continue",
) -> tuple[int, list[dict[str, Any]]]:
    """Exit code of a pod that `then` is done to once its node runs, in another thread; and what its operator heard."""
    node, heard = Stays(), Heard()
    restart = {"policy": policy}
    config = RuntimeConfig.model_validate({"name": "a", "nodes": 2, "workers_per_node": 1, "restart": restart})
    agent = AgentHere(argparse.Namespace(nproc_per_node=1), folder, folder)
    settings = NodeSettings(config, 1, "127.0.0.1", 9, ["a.py"], folder, folder, folder / "secret", b"")

    async def known(number: int, at: NodeStart) -> NodeSettings:
        return settings

    monkeypatch.setattr(agent_here, "Node", lambda *_: node)
    monkeypatch.setattr(agent, "_settings", known)

    def do() -> None:
        assert node.runs.wait(PATIENCE_S)
        then(agent, node)

    def give_up() -> None:
        with contextlib.suppress(RuntimeError):
            agent.leave(99)

    doing, watch = threading.Thread(target=do), threading.Timer(PATIENCE_S, give_up)
    watch.start()
    agent.begin(NodeStart(1, 2, "127.0.0.1"))
    doing.start()
    code = agent.run(heard)  # type: ignore[arg-type]  # it hears of ends alone
    watch.cancel()
    doing.join()
    return code, heard.ended


def terminate(node: Stays) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert node.asked.wait(PATIENCE_S)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("how", ["left", "cancelled", "succeeded", "failed", JobFailedError("cancelled")], ids=str)
def test_a_pod_that_is_told_to_end_ends_with_its_job(
    how: str | Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted: nobody is told to restart the job, and no other order is waited for."""

    def then(_: AgentHere, node: Stays) -> None:
        terminate(node)
        node.end(how)

    assert run_to_its_end(tmp_path, monkeypatch, then) == (130, [])


@pytest.mark.usefixtures("handlers")
def test_a_pod_that_is_told_to_end_is_not_started_again_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then(agent: AgentHere, node: Stays) -> None:
        terminate(node)
        asyncio.run(agent.end())

    assert run_to_its_end(tmp_path, monkeypatch, then) == (130, [])


@pytest.mark.usefixtures("handlers")
def test_who_waits_for_the_agents_end_is_told_when_the_pod_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = []

    def then(agent: AgentHere, node: Stays) -> None:
        thread = threading.Thread(target=lambda: asyncio.run(agent.end()))
        waiting.append(thread)
        agent.leave(130)
        thread.start()

    assert run_to_its_end(tmp_path, monkeypatch, then, policy="wait") == (130, [])
    until(lambda: not waiting[0].is_alive(), "it waits for an agent that has ended")
