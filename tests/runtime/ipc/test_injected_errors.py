"""Every error of the kernel and of TLS at reads and writes of every server and client: it ends one connection.

No server ends, no client gives up, and nothing that was said is lost. 2,000 of them: `make test-thorough`.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import peer_node
import pytest
from socket_errors import Injector, injected

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import UnreachableError
from hyperpod_ext.runtime.agent.coordinator_client import CoordinatorClient
from hyperpod_ext.runtime.agent.election import ElectionListener
from hyperpod_ext.runtime.agent.memory_client import AsyncMemoryClient
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.agent.workers import Workers, _Worker
from hyperpod_ext.runtime.control_plane.agent import Session
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.connections import BrokenConnectionError, breaking
from hyperpod_ext.runtime.ipc.environment import WorkerEnvironment
from hyperpod_ext.runtime.ipc.http_server import HttpServer, Response
from hyperpod_ext.runtime.ipc.listener import Listener
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient, MemoryLostError
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.memory_server.server import Server
from hyperpod_ext.runtime.memory_server.state import NodeMemory
from hyperpod_ext.runtime.metrics.endpoint import metrics_server
from hyperpod_ext.runtime.process_group.groups import ProcessGroups
from hyperpod_ext.runtime.process_group.store import Endpoint

SECRET = b"0123456789abcdef"
COUNTS = [pytest.param(12, id="a few"), pytest.param(250, id="many", marks=pytest.mark.thorough)]
FAR = 12
"""An error strikes one of so many reads and writes."""
PATIENCE_S = 120.0


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def encrypted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# --- agents and their coordinator -----------------------------------------------------------------


class Node:
    """An agent's line to the coordinator, and where others reach it; it has no processes."""

    def __init__(self, number: int, folder: Path, config: RuntimeConfig, errors: list[str]) -> None:
        self.number, self.errors = number, errors
        self.election = ElectionListener(SECRET, errors.append, encrypted=config.encrypted)
        self.settings = NodeSettings(config, number, "", 0, ["train.py"], folder, folder, folder / "secret", SECRET)
        self.client = CoordinatorClient(self.settings, self.election, self._who, self._take_over)

    def _who(self, own_id: str, term: int, job_state: Any) -> c.AgentHandshake:
        return c.AgentHandshake(
            node=self.number, id=own_id, pid=1, peer=("127.0.0.1", 1), address=self.election.address, domain="",
            generation=1, workers={}, committed=0, exited={}, term=term, job_state=job_state, clock=time.monotonic(),
        )  # fmt: skip

    def _take_over(self, *_: Any) -> None:
        self.errors.append(f"node {self.number} takes over")

    async def obey(self, where: tuple[str, int]) -> None:
        await self.client.connect(lambda: where, lambda: "")
        self.client.send_handshake()
        while await self.client.next() is not None:
            pass
        self.errors.append(f"node {self.number} has no coordinator")


def probes(folder: Path) -> list[int]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return sorted(event["number"] for event in map(json.loads, lines) if event["event"] == "probe")


@pytest.mark.parametrize("count", COUNTS)
def test_agents_and_their_coordinator(tmp_path: Path, count: int, encrypted: bool) -> None:
    config = RuntimeConfig.model_validate(
        {"name": "a", "nodes": 2, "workers_per_node": 1, "spares": 1, "network": {"tls": encrypted}}
    )
    config = config.model_copy(update={"restart": config.restart.model_copy(update={"lease_s": 60.0})})
    errors: list[str] = []

    async def run(inject: Injector) -> int:
        nodes = [Node(number, tmp_path, config, errors) for number in range(3)]
        for node in nodes:
            await node.election.open("127.0.0.1", 0)
        coordinator = Coordinator.first(config, 0, tmp_path, 1)
        nodes[0].election.lead_to(coordinator)
        lives = [asyncio.create_task(node.obey(nodes[0].election.address)) for node in nodes]
        said = 0
        while any(node.client.news is None for node in nodes):
            await asyncio.sleep(0.01)
        for _ in range(count):
            inject.arm(FAR)
            while inject.is_armed:
                for node in nodes:
                    node.client.send(c.Event(event="probe", t=0.0, fields={"number": said}))
                    said += 1
                await asyncio.sleep(0.002)
            while len(set(probes(tmp_path))) < said or not all(node.client.has_coordinator for node in nodes):
                assert not errors
                for life in lives:
                    assert not life.done(), life.exception()
                await asyncio.sleep(0.01)
        assert not coordinator.ended.done()
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        for node in nodes:
            await node.client.close()
            await node.election.close()
        coordinator.stop()
        return said

    with injected(count, encrypted=encrypted) as inject:
        said = asyncio.run(asyncio.wait_for(run(inject), PATIENCE_S * max(1, count / 50)))
    assert inject.struck == count
    assert set(probes(tmp_path)) == set(range(said))
    events = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert "node_lost" not in events[: events.count("probe")]
    assert errors == []


# --- a worker and its agent -----------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_a_worker_and_its_agent(tmp_path: Path, count: int) -> None:
    """All reports and orders arrive once, in their order."""
    config = RuntimeConfig(name="a", nodes=1, workers_per_node=1)
    settings = NodeSettings(config, 0, "127.0.0.1", 1, ["t.py"], tmp_path, tmp_path, tmp_path / "secret", SECRET)
    heard: list[int] = []
    errors: list[str] = []

    def tell(report: Any) -> None:
        if isinstance(report, c.Event):
            heard.append(report.fields["number"])

    async def run(inject: Injector) -> None:
        unused: Any = None
        workers = Workers(settings, unused, tell=tell, event=lambda *_, **__: None, spawn=lambda work: work.close())
        worker = workers._workers[0] = _Worker(
            pid=os.getpid(), log=tmp_path / "log", heartbeat=workers.monitor.new_page(), rank=0, local_rank=0
        )
        listener = Listener(workers.serve, errors.append)
        await listener.listen_unix(tmp_path / "agent")
        environment = WorkerEnvironment(0, 1, 0, 0, str(tmp_path / "agent"), "", SECRET, config)
        session = await asyncio.to_thread(Session, environment, ProcessGroups())
        while worker.writer is None:
            await asyncio.sleep(0.01)
        said = 0
        for _ in range(count):
            inject.arm(FAR)
            while inject.is_armed:
                await asyncio.to_thread(session.event, "probe", number=said)
                workers.send(c.GoOn(generation=1, step=said))
                said += 1
            while len(heard) < said or session._inbox.qsize() < said:
                assert not errors
                await asyncio.sleep(0.002)
        assert heard == list(range(said))
        orders = [session._inbox.get_nowait() for _ in range(said)]
        assert [order.step for order in orders if isinstance(order, c.GoOn)] == list(range(said))
        ended.set()
        session._endpoint.close()
        await listener.close()

    ended = threading.Event()

    def end(code: int) -> None:
        if not ended.is_set():
            errors.append(f"the worker ends with {code}")

    with injected(count) as inject, mock.patch.object(os, "_exit", end):
        asyncio.run(asyncio.wait_for(run(inject), PATIENCE_S))
        for thread in threading.enumerate():  # later its exit would be that of this process
            if thread.name == "hpx-session":
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
    assert inject.struck == count
    assert errors == []


# --- memory servers -------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """The socket of a memory server, which is a thread here."""
    config, path = RuntimeConfig(name="a", nodes=1, workers_per_node=1), tmp_path / "memory"
    held = NodeMemory(
        CheckpointPolicy(), job="a", secret=SECRET, node=0, nodes=1, owners=1, usable_bytes=lambda: 1 << 30
    )
    threading.Thread(target=Server(path, held, config).serve, daemon=True).start()
    while not path.exists():
        time.sleep(0.01)
    return path


@pytest.mark.parametrize("count", COUNTS)
def test_a_worker_and_an_agent_that_ask_the_memory_server(memory: Path, count: int) -> None:
    client, agent = MemoryClient(str(memory), another=True), AsyncMemoryClient(memory)

    def ask() -> None:
        while True:
            try:
                client.ask(r.Held())
                return
            except MemoryLostError:
                client.connect()

    async def run(inject: Injector) -> None:
        for _ in range(count):
            inject.arm(FAR)
            while inject.is_armed:
                await asyncio.gather(asyncio.to_thread(ask), agent.ask(r.Status()))

    with injected(count) as inject:
        asyncio.run(asyncio.wait_for(run(inject), PATIENCE_S))
        inject.disarm()
        ask()
    client.close()
    assert inject.struck == count


@pytest.mark.parametrize("count", COUNTS)
def test_memory_servers_of_two_nodes(count: int, encrypted: bool) -> None:
    """A read that fails says so by its own error; copies come again with the next snapshot."""
    here, there = (peer_node.Node(number, encrypted=encrypted) for number in range(2))
    data = peer_node.content(1 << 20)
    try:
        for node in (here, there):
            node.replicator.set_peers({0: here.address, 1: there.address}, {0: "", 1: ""})
        reader = here.client()
        with injected(count, encrypted=encrypted) as inject:
            step = 0
            for _ in range(count):
                inject.arm(FAR)
                while inject.is_armed:
                    step += 1
                    here.save(0, step, data)
                    try:
                        reader.held()
                    except UnreachableError:
                        assert not inject.is_armed
                    here.replicator.wait_idle(PATIENCE_S)
            inject.disarm()
            deadline = time.monotonic() + PATIENCE_S
            while step not in peer_node.steps(there.replicas):
                assert time.monotonic() < deadline
                step += 1
                here.save(0, step, data)
                here.replicator.wait_idle(PATIENCE_S)
                time.sleep(0.05)
        assert reader.held()[0]
        assert inject.struck == count
    finally:
        here.close()
        there.close()


# --- ranks' key-value servers ---------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_key_value_servers_of_ranks(count: int) -> None:
    errors: list[str] = []
    ends = [Endpoint(rank, SECRET, errors.append) for rank in range(2)]
    addresses = [("127.0.0.1", end.port) for end in ends]
    with injected(count) as inject:
        stores = [end.open(addresses, 1) for end in ends]
        said = 0
        for _ in range(count):
            inject.arm(FAR)
            while inject.is_armed:
                for rank, store in enumerate(stores):
                    store.set(f"{said}/{1 - rank}", str(said))
                    assert store.get(f"{said}/{1 - rank}") == str(said).encode()
                said += 1
        assert inject.struck == count
    for end in ends:
        end.close()
    assert errors == []


def test_only_a_connect_can_be_refused() -> None:
    """Callers take a refusal for a port at which nobody listens, and do not try again."""
    with pytest.raises(BrokenConnectionError, match="Connection refused"), breaking():
        raise ConnectionRefusedError(111, "Connection refused")
    with pytest.raises(ConnectionRefusedError), breaking(connects=True):
        raise ConnectionRefusedError(111, "Connection refused")


# --- HTTP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_numbers_and_operators(count: int) -> None:
    errors: list[str] = []

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nconnection: close\r\n\r\n")
        try:
            return await reader.read()
        finally:
            writer.close()

    async def run(inject: Injector) -> None:
        metrics = metrics_server(lambda: "numbers\n", lambda: "{}", errors.append)
        operator = HttpServer(lambda request: Response(200, "state"), errors.append)
        ports = [await metrics.listen("127.0.0.1", 0), await operator.listen("127.0.0.1", 0)]
        for _ in range(count):
            inject.arm(FAR)
            while inject.is_armed:
                await asyncio.gather(*map(ask, ports), return_exceptions=True)
        inject.disarm()
        assert [b"200" in await ask(port) for port in ports] == [True, True]
        await metrics.close()
        await operator.close()

    with injected(count) as inject:
        asyncio.run(asyncio.wait_for(run(inject), PATIENCE_S))
    assert inject.struck == count
    assert errors == []
