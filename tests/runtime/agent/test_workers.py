"""Worker processes of a node that are no longer wanted by the time they are there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.agent import reports
from hyperpod_ext.runtime.agent.children import on_exit
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.agent.workers import Workers
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import encode, with_version
from hyperpod_ext.runtime.memory_server.protocol import requests as r


class ForkServer:
    """Forks when it is told to."""

    def __init__(self) -> None:
        self.asked, self.may = asyncio.Event(), asyncio.Event()
        self.pids: list[int] = []

    async def fork(self, **_: Any) -> tuple[int, bool]:
        self.asked.set()
        await self.may.wait()
        self.pids.append(subprocess.Popen(["sleep", "600"]).pid)
        return self.pids[-1], False

    on_exit = staticmethod(on_exit)


class Recording(ForkServer):
    """Forks at once, and remembers what with."""

    def __init__(self) -> None:
        super().__init__()
        self.may.set()
        self.envs: list[dict[str, str]] = []

    async def fork(self, *, env: dict[str, str], **more: Any) -> tuple[int, bool]:
        self.envs.append(env)
        return await super().fork(**more)


def workers_in(
    folder: Path,
    events: list[str] | None = None,
    tell: Callable[[Any], None] = lambda report: None,
    spawn: Callable[[Any], Any] = lambda work: work.close(),
    asked: asyncio.Event | None = None,
) -> Workers:
    """`asked`: set when a worker joins, and its agent asks the memory server for its snapshots."""
    config = RuntimeConfig(name="a", nodes=1, workers_per_node=2)
    settings = NodeSettings(config, 0, "127.0.0.1", 1, ["train.py"], folder, folder, folder / "secret", b"secret")

    async def ask(request: Any) -> r.Snapshots:
        if asked is not None:
            asked.set()
        return r.Snapshots(snapshots=(), pieces=())

    memory: Any = SimpleNamespace(ask=ask)

    def event(name: str, **_: Any) -> None:
        if events is not None:
            events.append(name)

    return Workers(settings, memory, tell=tell, event=event, spawn=spawn)


def is_ended(pid: int) -> bool:
    """Whether it has been killed, whether that was heard of or not."""
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: not stat.exists() or stat.read_text().split()[2] in "SZ")
    return not stat.exists() or stat.read_text().split()[2] == "Z"


def is_reaped(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    "undo",
    [
        pytest.param(lambda workers: workers.kill_all(), id="all are ended"),
        pytest.param(lambda workers: workers.keep_only({0}), id="of another world"),
        pytest.param(lambda workers: workers.expect(1), id="expected once more"),
    ],
)
@pytest.mark.parametrize("when", ["before it is asked for", "while it is forked"])
def test_a_worker_that_is_not_wanted_any_longer_does_not_stay(
    tmp_path: Path, undo: Callable[[Workers], Any], when: str
) -> None:
    """It held the node's memory server, so that the last step of a job that was told to end was waited for in vain."""
    events: list[str] = []

    async def run() -> list[int]:
        workers = workers_in(tmp_path, events)
        fork_server: Any = ForkServer()  # all that is asked of one
        start = workers.expect(1)
        if when == "before it is asked for":
            undo(workers)
            await workers.start(start, fork_server)
        else:
            starting = asyncio.create_task(workers.start(start, fork_server))
            await fork_server.asked.wait()
            undo(workers)
            fork_server.may.set()
            await starting
        assert workers.ranks == []
        while not all(map(is_reaped, fork_server.pids)):
            await asyncio.sleep(0.005)
        return list(fork_server.pids)

    pids = asyncio.run(asyncio.wait_for(run(), 60))
    assert len(pids) == (0 if when == "before it is asked for" else 1)
    assert events == []


def test_a_worker_that_is_wanted_stays(tmp_path: Path) -> None:
    events: list[str] = []

    async def run() -> None:
        workers = workers_in(tmp_path, events)
        fork_server: Any = ForkServer()  # all that is asked of one
        fork_server.may.set()
        await workers.start(workers.expect(1), fork_server)
        assert workers.ranks == [1]
        workers.kill_all()
        while not is_reaped(fork_server.pids[0]):
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert events[0] == "worker_started"


SPEAKS = """\
import socket, sys, time
line = socket.socket(socket.AF_UNIX)
while line.connect_ex(sys.argv[1]):
    time.sleep(0.005)
line.sendall(bytes.fromhex(sys.argv[2]))
time.sleep(600)
"""


class Speaking(ForkServer):
    """Forks a process that connects as rank 1 and sends messages."""

    def __init__(self, folder: Path, *reports: c.FromWorker) -> None:
        super().__init__()
        self.path = folder / "socket"
        hello = with_version(encode(c.WorkerHandshake(rank=1, pid=1)))
        self._words = b"".join(map(wire.encode, [hello, *map(encode, reports)])).hex()

    async def fork(self, **_: Any) -> tuple[int, bool]:
        self.pids.append(subprocess.Popen([sys.executable, "-c", SPEAKS, str(self.path), self._words]).pid)
        return self.pids[-1], False

    async def adopt_orphans(self) -> None:
        pass


JOIN = c.Join(rank=1, generation=1, live=None, store_port=1)
FINISHED = c.Finished(digest="done")


async def end(workers: Workers, fork_server: ForkServer) -> None:
    workers.kill_all()
    while not all(map(is_reaped, fork_server.pids)):
        await asyncio.sleep(0.005)


def test_a_process_that_is_to_be_replaced_joins_no_generation(tmp_path: Path) -> None:
    """It is ended as soon as its successor can be started, and the generation would wait for it in vain."""

    async def run() -> None:
        told: asyncio.Queue[Any] = asyncio.Queue()
        workers = workers_in(tmp_path, tell=told.put_nowait)
        fork_server: Any = Speaking(tmp_path, JOIN, FINISHED)
        await workers.start(workers.expect(1), fork_server)
        old, this = fork_server.pids[0], workers.expect(1)
        server = await asyncio.start_unix_server(workers.serve, fork_server.path)
        assert isinstance(await told.get(), c.Finished)
        await workers.start(this, fork_server)
        assert is_ended(old)
        await end(workers, fork_server)
        server.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_a_process_has_asked_is_taken_back_when_it_is_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its join waits for that of the other rank here."""
    monkeypatch.setattr(reports, "_WAIT_S", 3600.0)

    async def run() -> None:
        told: asyncio.Queue[Any] = asyncio.Queue()
        joined = asyncio.Event()
        workers = workers_in(tmp_path, tell=told.put_nowait, spawn=asyncio.ensure_future, asked=joined)
        other: Any = Recording()
        await workers.start(workers.expect(0), other)
        fork_server: Any = Speaking(tmp_path, JOIN)
        await workers.start(workers.expect(1), fork_server)
        server = await asyncio.start_unix_server(workers.serve, fork_server.path)
        await joined.wait()
        workers.expect(1)
        os.kill(fork_server.pids[0], signal.SIGKILL)
        assert isinstance(await told.get(), c.Died)
        await end(workers, other)
        server.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_step_that_is_reported_late_keeps_the_number_of_its_rank(tmp_path: Path) -> None:
    """Rank 1 makes step 14, and is rank 0 when its agent reads that: rank 0 has made one, too."""

    async def run() -> None:
        told: asyncio.Queue[Any] = asyncio.Queue()
        workers = workers_in(tmp_path, tell=told.put_nowait)
        made = c.Event(rank=1, generation=1, event="step", t=1.0, fields={"step": 14})
        fork_server: Any = Speaking(tmp_path, made, made.model_copy(update={"generation": 2}))
        await workers.start(workers.expect(1), fork_server)
        workers.leave(c.AbortGeneration(generation=2, rank=0, moved={1: 0}, moved_in=2))
        server = await asyncio.start_unix_server(workers.serve, fork_server.path)
        assert [(await told.get()).rank for _ in range(2)] == [1, 0]
        await end(workers, fork_server)
        server.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_replacement_gets_the_device_that_is_free_though_numbers_have_changed(tmp_path: Path) -> None:
    """Rank 0 dies, and 1 is called 0 until another one joins, as 1."""

    async def run() -> None:
        workers = workers_in(tmp_path)
        fork_server: Any = Recording()
        for rank in (0, 1):
            await workers.start(workers.expect(rank), fork_server)
        lost, kept = fork_server.pids
        workers.leave(c.AbortGeneration(generation=2, rank=0, moved={1: 0}, moved_in=2))
        assert workers.ranks == [0]
        assert is_ended(lost), "its number is another one's"
        await workers.start(workers.expect(1, 2), fork_server)
        assert [env["LOCAL_RANK"] for env in fork_server.envs] == ["0", "1", "0"]
        workers.end_joining()
        assert workers.ranks == [0]
        assert not is_ended(kept)
        workers.kill_all()
        while not all(map(is_reaped, fork_server.pids)):
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("old", ["has ended", "is there still"])
@pytest.mark.parametrize("when", ["before it is asked for", "while it is forked", "before it connects"])
def test_a_worker_that_is_started_while_ranks_get_other_numbers_is_of_its_rank(
    tmp_path: Path, old: str, when: str
) -> None:
    """Rank 1 is replaced as the node of rank 0 is lost, and is called 0: it was not started, or stayed unknown."""

    async def run() -> None:
        workers = workers_in(tmp_path)
        fork_server: Any = ForkServer()
        if old == "is there still":
            fork_server.may.set()
            await workers.start(workers.expect(1), fork_server)
            fork_server.may.clear()
            fork_server.asked.clear()
        renumbered = c.AbortGeneration(generation=2, rank=0, moved={1: 0}, moved_in=2)
        start = workers.expect(1)
        if when == "before it is asked for":
            workers.leave(renumbered)
        starting = asyncio.create_task(workers.start(start, fork_server))
        await fork_server.asked.wait()
        if when == "while it is forked":
            workers.leave(renumbered)
        fork_server.may.set()
        await starting
        if when == "before it connects":
            workers.leave(renumbered)
        assert workers.ranks == [0]
        *former, new = fork_server.pids
        assert all(map(is_ended, former))
        assert not is_ended(new)
        assert {rank: worker.pid for rank, worker in workers.summary()["workers"].items()} == {0: new}
        workers.kill_all()
        while not all(map(is_reaped, fork_server.pids)):
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(run(), 60))


FORKS = """\
import os, socket, sys, time
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
line.sendall(bytes.fromhex(sys.argv[2]))
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), file=open(sys.argv[3], "w"), flush=True)
    time.sleep(600)
while not os.path.exists(sys.argv[3]):
    time.sleep(0.005)
sys.exit(3)
"""


class ForksOneThatForks(ForkServer):
    """Of what it forks, a process in a session of its own stays, and holds the line to the agent."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path, self.child = folder / "socket", folder / "child"

    async def fork(self, **_: Any) -> tuple[int, bool]:
        hello = wire.encode(with_version(encode(c.WorkerHandshake(rank=1, pid=1)))).hex()
        command = [sys.executable, "-c", FORKS, str(self.path), hello, str(self.child)]
        return subprocess.Popen(command).pid, False

    async def adopt_orphans(self) -> None:
        pass


def test_a_death_is_told_though_a_process_that_the_worker_forked_holds_its_line(tmp_path: Path) -> None:
    """A daemon is not ended with the worker. The job stood still, and nobody knew why."""

    async def run() -> Any:
        told: asyncio.Queue[Any] = asyncio.Queue()
        workers = workers_in(tmp_path, tell=told.put_nowait, spawn=asyncio.ensure_future)
        fork_server: Any = ForksOneThatForks(tmp_path)
        server = await asyncio.start_unix_server(workers.serve, fork_server.path)
        await workers.start(workers.expect(1), fork_server)
        try:
            return await told.get()
        finally:
            os.kill(int(fork_server.child.read_text()), signal.SIGKILL)
            server.close()

    death = asyncio.run(asyncio.wait_for(run(), 60))
    assert (death.rank, death.exit_code) == (1, 3)


def test_what_a_rank_met_in_a_former_generation_is_told_by_its_new_number(tmp_path: Path) -> None:
    """Its number was translated once more by the coordinator, which found nobody: the rank was waited for in vain."""

    async def run() -> Any:
        told: asyncio.Queue[Any] = asyncio.Queue()
        workers = workers_in(tmp_path, tell=told.put_nowait)
        failed = c.Failed(generation=1, cause="CUDA error", step=3, final=False, code="", hint="", place="")
        fork_server: Any = Speaking(tmp_path, failed)
        await workers.start(workers.expect(1), fork_server)
        workers.leave(c.AbortGeneration(generation=2, rank=0, moved={1: 0}, moved_in=2))
        server = await asyncio.start_unix_server(workers.serve, fork_server.path)
        report = await told.get()
        await end(workers, fork_server)
        server.close()
        return report

    report = asyncio.run(asyncio.wait_for(run(), 60))
    assert (report.rank, report.generation, report.joined) == (0, 2, 1)


def test_who_has_asked_before_it_was_known_which_generation_forms_is_of_that_one(tmp_path: Path) -> None:
    """Else its death is told as of a former one, and nobody leaves."""

    async def run() -> Any:
        told: asyncio.Queue[Any] = asyncio.Queue()
        workers = workers_in(tmp_path, tell=told.put_nowait, spawn=asyncio.ensure_future)
        fork_server: Any = Speaking(tmp_path, JOIN)
        await workers.start(workers.expect(1), fork_server)
        server = await asyncio.start_unix_server(workers.serve, fork_server.path)
        assert isinstance(await told.get(), c.NodeJoin)
        decision = c.RestoreDecision(step=0, sources={}, others="fresh")
        workers.send(
            c.BeginGeneration(generation=3, decision=decision, world_size=2, addresses={}, follows=0, peers={}, run="r")
        )
        os.kill(fork_server.pids[0], signal.SIGKILL)
        death = await told.get()
        server.close()
        return death

    death = asyncio.run(asyncio.wait_for(run(), 60))
    assert isinstance(death, c.Died)
    assert death.joined == 3
