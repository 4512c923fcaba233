"""At a container's limit of processes no thread can be started: who asks is turned away, and what is held stays."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served import JOB, SECRET, answers
from waiting import until

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import MemoryTierFullError
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient
from hyperpod_ext.runtime.memory_server.plans import Plans
from hyperpod_ext.runtime.memory_server.protocol.requests import WaitIdle
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority
from hyperpod_ext.runtime.memory_server.replication.receiver import PeerServer
from hyperpod_ext.runtime.memory_server.server import Server
from hyperpod_ext.runtime.memory_server.slots.budget import Budget
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.memory_server.state import NodeMemory

POLICY = CheckpointPolicy(tiers=(MemoryTier(),))


@pytest.fixture
def no_threads(monkeypatch) -> Callable[[], object]:
    """While it lasts, no thread can be started."""

    @contextmanager
    def limited() -> Iterator[None]:
        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            yield

    return limited


def hung_up(sock: socket.socket) -> bool:
    sock.settimeout(20)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_memory_server_turns_away_who_it_has_no_thread_for(tmp_path: Path, no_threads):
    memory = NodeMemory(POLICY, job=JOB, secret=SECRET, node=0, nodes=1, owners=1, usable_bytes=lambda: 1 << 30)
    path = tmp_path / "s"
    server = Server(path, memory, RuntimeConfig(name=JOB, nodes=1, workers_per_node=1, checkpoint=POLICY))
    serving = threading.Thread(target=server.serve, daemon=True)
    serving.start()
    until(lambda: answers(path))
    with no_threads(), socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
        assert hung_up(asking)
    client = MemoryClient(str(path))
    assert client.ask(WaitIdle(timeout_s=0)).idle
    client.close()


def test_a_peer_that_there_is_no_thread_for_is_turned_away(no_threads):
    own, replicas = (
        Regions(kind=kind, job=JOB, secret=SECRET, budget=Budget(None, lambda: 1 << 30), slots=2)
        for kind in ("own", "replica")
    )
    server = PeerServer(own, replicas, Plans(), secret=SECRET, job=JOB, cpu_priority=CpuPriority(1.0), host="127.0.0.1")
    server.start()
    try:
        with no_threads(), socket.create_connection(("127.0.0.1", server.port)) as asking:
            assert hung_up(asking)
        assert not server._unproven.all()
        client = PeerClient("127.0.0.1", server.port, SECRET)
        assert client.held() == ([], [])
        client.close()
    finally:
        server.close()


def test_memory_whose_pages_no_thread_can_make_is_refused_and_given_back(no_threads):
    budget = Budget(1 << 20, lambda: 1 << 30)
    for _ in range(3):
        with no_threads(), pytest.raises(MemoryTierFullError, match="the system cannot allocate shared memory"):
            budget.make("hpx-no-threads", 1 << 19, 2, "rank 0")
    assert not any("hpx-no-threads" in str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
    budget.make("hpx-no-threads", 1 << 19, 2, "rank 0").close()
