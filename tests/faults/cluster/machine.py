"""A simulated machine: the agent on it is real; its processes, its memory and its clock are not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.agent import copies, election, orders, supervisors
from hyperpod_ext.runtime.agent import node as agent_node
from hyperpod_ext.runtime.agent import workers as agent_workers
from hyperpod_ext.runtime.agent.node import Node
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.coordinator import coordinator, outbox
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.detection.failure_causes import FaultKind, decode_exit
from hyperpod_ext.runtime.detection.health import Health
from hyperpod_ext.runtime.events.log import EventLog
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.membership.candidates import choose_candidates

from .event_loop import PROCESS, Process
from .memory import Memory
from .worker import Worker

if TYPE_CHECKING:
    from .cluster import Cluster

PORT = 29_500
_START_S = (0.05, 0.4)
"""From the order to start a worker to its first word."""
_REAPED_S = 0.001
_NEVER_S = 1e9


class Machine:
    """One node of the cluster, and what runs on it."""

    def __init__(self, cluster: Cluster, node: int, clock: float) -> None:
        self.cluster, self.node, self.clock, self.host = cluster, node, clock, f"10.0.0.{node}"
        self.agent: Process | None = None
        self.memory: Memory | None = None
        self.workers: dict[int, Worker] = {}
        self._hear_exit: dict[int, Callable[[int], None]] = {}
        self._statuses: dict[int, int] = {}
        self.ended = ""
        """What its agent has ended with."""
        self._agents = 0

    @property
    def agent_socket(self) -> Path:
        return self.cluster.folder / f"node{self.node}.agent"

    def boot(self, *, rejoin: bool = False) -> None:
        """An agent is started."""
        cluster = self.cluster
        self._agents += 1
        self.ended = ""
        self.agent = Process(cluster.loop, f"agent {self.node}", self.host, self.clock)
        self.agent.machine = self  # type: ignore[attr-defined]
        self.memory = Memory(cluster.loop.time, self._replicate, self.node)
        settings = NodeSettings(
            config=cluster.config,
            node=self.node,
            host=cluster.machines[0].host if self.node else self.host,
            port=PORT,
            argv=["train.py"],
            run_dir=cluster.folder,
            socket_dir=cluster.folder,
            secret_file=cluster.folder / "secret",
            secret=b"the secret of this job",
            chaos=False,
            rejoin=rejoin,
            join_timeout_s=60.0,
        )
        self.agent.start(self._run(self.agent, settings))

    async def _run(self, agent: Process, settings: NodeSettings) -> None:
        try:
            ended = await Node(settings, self._watch).run()
        except HyperpodExtError as error:
            ended = f"{type(error).__name__}: {error}"
        except Exception as error:
            self.cluster.tell(traceback.format_exc())
            self.cluster.judge.violated(f"the agent of node {self.node} meets {error!r}")
            raise
        if self.agent is agent:
            self._end(ended)

    def _watch(self, message: c.ToAgent | c.FromAgent) -> None:
        if isinstance(message, c.JobNews | c.BeginGeneration):
            self.cluster.judge.ordered(self.node, message)

    def _end(self, how: str) -> None:
        self.cluster.tell(f"agent {self.node} ends: {how}")
        self.ended, agent, self.agent, self.memory = how, self.agent, None, None
        for worker in list(self.workers.values()):
            worker.kill()
        self.workers.clear()
        if agent is not None:
            agent.kill()

    def lose(self, *, silent: bool) -> None:
        """All of it is gone at once; `silent`: not even its connections say so."""
        if silent:
            self.cluster.network.vanish(self.host)
        self._end("lost")

    def _replicate(self, node: int, copy: Any) -> None:
        """A copy arrives on another node, if both are there still then."""
        cluster, there = self.cluster, self.cluster.machines[node]

        def arrive() -> None:
            if self.memory is not None and there.memory and not cluster.network.is_cut(self.host, there.host):
                there.memory.receive(copy)

        cluster.loop.call_later(cluster.rng.uniform(0.005, 0.1), arrive)

    # --- its processes --------------------------------------------------------------------------

    def fork(self, rank: int) -> int:
        pid = self.cluster.new_pid()
        worker = self.workers[pid] = Worker(self.cluster, self, rank, pid)
        worker.at_end.append(lambda: self.exited(worker, signal.SIGKILL))
        worker.soon(lambda: worker.start(worker.run()), self.cluster.rng.uniform(*_START_S))
        return pid

    def exited(self, worker: Worker, status: int) -> None:
        """A worker's process is gone; its parent hears of it."""
        if self.workers.pop(worker.pid, None) is None:
            return
        self.cluster.collectives.leave(worker)
        self._statuses[worker.pid] = status
        if status == 0:
            worker.kill()
        self._reap(worker.pid)

    def on_exit(self, pid: int, tell: Callable[[int], None]) -> None:
        self._hear_exit[pid] = tell
        self._reap(pid)

    def _reap(self, pid: int) -> None:
        if pid in self._statuses and pid in self._hear_exit and self.agent is not None:
            tell, status = self._hear_exit.pop(pid), self._statuses.pop(pid)
            self.agent.soon(lambda: tell(status), _REAPED_S)


def here() -> Machine:
    """The machine that this code runs on."""
    machine: Machine = PROCESS.get().machine  # type: ignore[attr-defined]
    return machine


class _Coordinator(Coordinator):
    """The real one; all that it logs is seen, from its first line."""

    def _start(self, orders_accepted: set[str]) -> None:
        machine = here()
        self.events._together = []  # lines are written when somebody reads them: a file is slow
        self.events.listeners.append(lambda event: machine.cluster.judge.logged(machine.node, self, event))
        super()._start(orders_accepted)

    def show(self) -> None:
        machine = here()
        machine.cluster.tell(f"node {machine.node} coordinates")
        super().show()


# --- what an agent finds in place of the machine ----------------------------------------------------


class _ForkServer:
    pid, is_ready, notes = 1, True, ()

    def __init__(self, preload: object, environ: object) -> None:
        pass

    async def connect(self, environ: object) -> None:
        pass

    async def ready(self) -> float:
        return 0.0

    async def fork(self, *, env: Mapping[str, str], **_: object) -> tuple[int, bool]:
        return here().fork(int(env["RANK"])), False

    def on_exit(self, pid: int, tell: Callable[[int], None]) -> None:
        here().on_exit(pid, tell)

    async def adopt_orphans(self) -> None:
        pass


class _MemoryServer:
    def __init__(self, *_: object) -> None:
        self.pid = 2

    def begin(self, *_: object) -> None:
        pass


def _send_signal(pid: int) -> None:
    """Kill a simulated process, unless it has ended."""
    if (worker := here().workers.get(pid)) is not None:
        worker.kill()


class _NoLock:
    def __init__(self, path: Path) -> None:
        pass

    def prepare(self) -> None:
        pass


class _NoThread:
    def __init__(self, **_: object) -> None:
        pass

    def start(self) -> None:
        pass


class _NoOomKills:
    def since_last(self) -> bool:
        return False


class _Page:
    """The heartbeat of a worker that has come to no phase."""

    path = ""

    def read(self) -> Any:
        return mock.Mock(marks=0)


class _Monitor:
    """Of the hang monitor, all but the looking: nothing hangs here that is not ended from outside."""

    def __init__(self, settings: object, workers: Callable[[], Mapping[int, Any]], *_: object) -> None:
        self._workers = workers
        self.on_node_fault: Any = None

    def new_page(self) -> Any:
        return _Page()

    def heard(self, worker: Any, report: c.Event) -> None:
        pass

    def see_report(self, report: c.ToAgent | c.FromAgent) -> None:
        pass

    def answer(self) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()

    def end(self, rank: int, cause: str, kind: FaultKind | None = None) -> None:
        if (worker := self._workers().get(rank)) is not None:
            worker.kill_reason, worker.kind = cause, kind
            _send_signal(worker.pid)

    def exit_cause(self, worker: Any, status: int, last_log_line: str) -> dict[str, Any]:
        cause = decode_exit(status, kill_reason=worker.kill_reason, last_log_line=last_log_line)
        kind = worker.kind or cause.kind
        return {"cause": cause.cause, "kind": kind, "step": worker.step, "phase": "", "place": ""}


async def _healthy(context: object) -> Health:
    return Health({}, 0.0)


def _kill_descendants(pid: int) -> None:
    for worker in list(here().workers.values()):
        worker.kill()


@contextlib.contextmanager
def simulated_machines(candidates: int) -> Iterator[None]:
    """Agents find simulated machines in place of this one, and coordinators share the job state with so many nodes."""
    with contextlib.ExitStack() as stack:

        def replace(module: Any, **names: Any) -> None:
            stack.enter_context(mock.patch.multiple(module, **names))

        replace(
            agent_node,
            AsyncMemoryClient=lambda path, limit_s: here().memory,
            become_subreaper=lambda: None,
            kill_descendants=_kill_descendants,
        )
        replace(
            supervisors,
            ForkServer=_ForkServer,
            MemoryServer=_MemoryServer,
            OomKills=_NoOomKills,
            on_exit=lambda pid, tell: None,
        )
        replace(election, Coordinator=_Coordinator, free_port=lambda host: 29_400, places_for=lambda nodes: 1024)
        replace(orders, examine_until_fit=_healthy, check_tiers=lambda config: None)
        replace(NodeSettings, worker_environ=lambda settings: {})
        # nobody gives an order, and no copy has anything to tell: they are not looked for several times a second
        replace(coordinator, _ORDERS_S=_NEVER_S)
        replace(outbox, choose_candidates=functools.partial(choose_candidates, most=candidates))
        replace(copies, _WATCH_S=_NEVER_S)
        # of each story a report is much work; and lines are written when somebody reads them, see `_Coordinator`
        replace(EventLog, reporter=lambda log, **told: lambda: told, together=lambda log: contextlib.nullcontext())
        replace(
            agent_workers,
            send_signal=_send_signal,
            kill_group=lambda leader: None,
            LivenessLock=_NoLock,
            HangMonitor=_Monitor,
            threading=mock.Mock(Thread=_NoThread),
            has_gpu=lambda: False,
            all_live=lambda pids: all(pid in here().workers for pid in pids),
        )
        yield
