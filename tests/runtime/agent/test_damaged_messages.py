"""What an agent and a worker do with damaged messages of those they trust: refuse each by name, and read the next."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import damaged
import pytest

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.agent.children import on_exit
from hyperpod_ext.runtime.agent.coordinator_client import CoordinatorClient
from hyperpod_ext.runtime.agent.election import ElectionListener
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.agent.workers import Workers
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode

COUNT = 500
SECRET = b"0123456789abcdef"
CONFIG = RuntimeConfig(name="a", nodes=1, workers_per_node=1)


def settings_in(folder: Path) -> NodeSettings:
    return NodeSettings(CONFIG, 0, "127.0.0.1", 0, ["train.py"], folder, folder, folder / "secret", SECRET)


def assert_all_refused(text: str, words: str) -> None:
    lines = text.splitlines()
    assert len(lines) == COUNT, lines[-3:]
    assert all(line.startswith(words) for line in lines)


def test_an_agent_refuses_those_of_its_coordinator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wire.accept_peer(reader, writer, SECRET)
        for message in damaged.messages(c.AGENT_ORDERS, COUNT):
            writer.write(wire.encode(message))
        writer.write(wire.encode(encode(c.StartWorker(rank=0))))
        await writer.drain()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        unused: Any = None
        client = CoordinatorClient(settings_in(tmp_path), ElectionListener(SECRET, print), unused, unused)
        await client.connect(lambda: ("127.0.0.1", port), lambda: "")
        assert await client.next() == c.StartWorker(rank=0)
        await client.close()
        server.close()

    asyncio.run(run())
    assert_all_refused(capsys.readouterr().err, "node 0 refused a message of the coordinator: ")


class ForkServer:
    """Starts a worker that says what is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def fork(self, **_: Any) -> tuple[int, bool]:
        program = [sys.executable, damaged.__file__, str(self._path), "0", str(COUNT)]
        return subprocess.Popen(program, stderr=subprocess.DEVNULL).pid, False

    on_exit = staticmethod(on_exit)


def test_an_agent_refuses_those_of_its_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        heard: asyncio.Queue[Any] = asyncio.Queue()
        unused: Any = None
        path = tmp_path / "agent"
        workers = Workers(
            settings_in(tmp_path), unused, tell=heard.put_nowait, event=_nothing, spawn=lambda work: work.close()
        )
        server = await asyncio.start_unix_server(workers.serve, path)
        fork_server: Any = ForkServer(path)
        await workers.start(workers.expect(0), fork_server)
        assert (await heard.get()).digest == "right"
        server.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert_all_refused(capsys.readouterr().err, "a message of rank 0 was refused: ")


def _nothing(*_: Any, **__: Any) -> None: ...


WORKER = """
import sys
from pathlib import Path
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.control_plane.agent import Session
from hyperpod_ext.runtime.ipc.environment import WorkerEnvironment
from hyperpod_ext.runtime.process_group.groups import ProcessGroups

config = RuntimeConfig(name="a", nodes=1, workers_per_node=1)
environment = WorkerEnvironment(0, 1, 0, 0, sys.argv[1], "", b"0123456789abcdef", config)
print(Session(environment, ProcessGroups()).wait_aborted(60.0))
"""


def test_a_worker_refuses_those_of_its_agent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "agent"))
        listening.listen()
        program = [sys.executable, "-c", WORKER, str(tmp_path / "agent")]
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
            sock, _ = listening.accept()
            with sock:
                handshake = wire.receive(sock)
                assert handshake is not None
                assert handshake["rank"] == 0
                for message in damaged.messages(c.WORKER_ORDERS, COUNT):
                    wire.send(sock, message)
                wire.send(sock, encode(c.AbortGeneration(generation=7, rank=0)))
                output, refusals = worker.communicate(timeout=60)
    assert output == "True\n"
    assert_all_refused(refusals, "a message from the agent was refused: ")
