"""AWS's agent without workers: its server, its states and its loop, for calls that are compared with ours.

Run by the interpreter of `hyperpodrun_env`. It prints the server's port, and then follows lines of its input, each
answered by one: `new` and `new --inprocess-restart` (another agent), `turn` (its loop goes on until it waits for
something), `fail` and `finish` (of the workers). The loop stands still between them, so that what is read does not
depend on time.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

os.environ |= {"NNODES": "2", "LOGLEVEL": "CRITICAL"}

from hyperpod_elastic_agent.config import PrePostTrainConfig, ShutdownConfig
from hyperpod_elastic_agent.elastic_agent.ipr_hyperpod_elastic_agent import IPRHyperPodElasticAgent
from hyperpod_elastic_agent.elastic_agent.plr_hyperpod_elastic_agent import PLRHyperPodElasticAgent
from hyperpod_elastic_agent.ipc import HyperPodPLRException, InProcessRestartSocketServer
from hyperpod_elastic_agent.ipc.common import InProcessRestartSocketMessageType
from hyperpod_elastic_agent.rendezvous import HyperPodRendezvousBackend
from hyperpod_elastic_agent.server import HyperPodElasticAgentServer
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

TURNS = 6
"""After so many the loop waits: an end, a stage before the training, the training, one after it, the end."""


class Workers(InProcessRestartSocketServer):
    """Workers that do at once what `--inprocess-restart` asks of them, until they have ended."""

    there = True

    def _send_rank_info_helper(self, worker_envs, message_type, aggregate_worker_data=None):
        for local_rank, env in worker_envs.items():
            self.ipc_wg.update_rank_info(local_rank, int(env["GROUP_RANK"]), int(env["RANK"]))
            if message_type is InProcessRestartSocketMessageType.JOB_START:
                self.ipc_wg.notify_rank_past_barrier(local_rank)

    def send_fault(self, restart_count):
        pass

    def get_ranks_at_barrier(self, timeout=None, init=False):
        if not self.there:
            raise HyperPodPLRException("the workers have ended")
        for local_rank in self.ipc_wg.workers:
            self.ipc_wg.notify_rank_at_barrier(local_rank)


class StandsStill:
    """Of an agent: starts no processes, and makes a turn of its loop when it is told to."""

    def _start_workers(self, worker_group):
        if isinstance(self, InProcess):
            self._ipc_server.there = True
        return dict(enumerate(range(1, 1 + worker_group.spec.local_world_size)))

    def _monitor_workers(self, worker_group):
        self.waits.set()
        self.may_turn.acquire()
        return super()._monitor_workers(worker_group)

    def begin(self) -> None:
        self.waits, self.may_turn = threading.Event(), threading.Semaphore(0)
        self.loop = threading.Thread(target=self._invoke_run, daemon=True)
        self.loop.start()
        self._until_it_waits()

    def turn(self) -> None:
        for _ in range(TURNS):
            self.waits.clear()
            self.may_turn.release()
            self._until_it_waits()

    def _until_it_waits(self) -> None:
        while self.loop.is_alive() and not self.waits.wait(0.05):
            pass

    def end(self) -> None:
        self._agent_state = "SHUTDOWN"
        self.may_turn.release(2)
        self.loop.join()

    def workers_are(self, state: WorkerState) -> None:
        self.turn()
        self._worker_group.state = state
        if isinstance(self, InProcess):
            self._ipc_server.there = False
        self.turn()


class Plain(StandsStill, PLRHyperPodElasticAgent):
    """That of `hyperpodrun`."""


class InProcess(StandsStill, IPRHyperPodElasticAgent):
    """That of `hyperpodrun --inprocess-restart`."""

    def begin(self) -> None:
        self._ipc_server = Workers(1)
        super().begin()
        self.turn()


def new(folder: Path, kind: type[StandsStill] = Plain) -> StandsStill:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    spec = WorkerSpec(
        role="default",
        local_world_size=1,
        entrypoint="train.py",
        args=(),
        rdzv_handler=HyperPodRendezvousBackend("compared", 1, str(folder)),
        monitor_interval=1e-4,
    )
    agent = kind(
        spec=spec,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        pre_post_train_config=PrePostTrainConfig(),
        shutdown_config=ShutdownConfig(),
        version="1.1.3",
    )
    agent.begin()
    return agent


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = scratch
        folder = Path(scratch) / "config"
        agent = new(folder)
        server = HyperPodElasticAgentServer(agent, {"host": "127.0.0.1", "port": 0, "log_level": "critical"})
        server.daemon = True
        ready = threading.Event()
        startup = server._server.startup

        async def told(*args, **kwargs):
            await startup(*args, **kwargs)
            ready.set()

        server._server.startup = told
        server.start()
        ready.wait()
        print(server._server.servers[0].sockets[0].getsockname()[1], flush=True)
        for line in sys.stdin:
            match line.strip():
                case "new":
                    agent.end()
                    server._agent = agent = new(folder)
                case "new --inprocess-restart":
                    agent.end()
                    server._agent = agent = new(folder, InProcess)
                case "turn":
                    agent.turn()
                case "fail":
                    agent.workers_are(WorkerState.FAILED)
                case "finish":
                    agent.workers_are(WorkerState.SUCCEEDED)
            print(json.dumps(agent.loop.is_alive()), flush=True)
        agent.end()


main()
