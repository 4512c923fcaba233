"""`python -m hyperpod_ext.runtime.memory_server.standalone --socket PATH ...`: a memory server without an agent.

It serves one run of the job after another, in whatever world size, and ends by itself: when nobody has
been connected for a while, and everything that was due has been brought to the durable tiers.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.environment import ENV_SECRET_FILE, read_secret
from hyperpod_ext.runtime.memory_server.client.start import locked
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import own_group
from hyperpod_ext.runtime.memory_server.server import Answer, Server
from hyperpod_ext.runtime.memory_server.slots.host_memory import usable_bytes
from hyperpod_ext.runtime.memory_server.state import NodeMemory

_TICK_S = 1.0


class LonelyServer(Server):
    """A memory server that knows when it is needed no more."""

    def __init__(self, path: Path, memory: NodeMemory, config: RuntimeConfig, lock: Path, idle_exit_s: float) -> None:
        super().__init__(path, memory)
        self._config, self._lock, self._idle_exit_s = config, lock, idle_exit_s
        self._connections, self._alone_since = 0, time.monotonic()
        self._counting = threading.Lock()
        threading.Thread(target=self._end_when_idle, name="end when idle", daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with self._counting:
            self._connections += 1
        try:
            super()._converse(connection)
        finally:
            with self._counting:
                self._connections -= 1
                self._alone_since = time.monotonic()

    def _end_when_idle(self) -> None:
        while True:
            time.sleep(min(_TICK_S, max(self._idle_exit_s / 4, 0.05)))
            if not self._idle():
                continue
            try:
                with locked(self._lock):  # whoever starts one or finds this one holds it
                    if self._idle():
                        self._path.unlink(missing_ok=True)
                        os._exit(0)
            except FileNotFoundError:  # the folder of its socket is gone: nobody can find this one any more
                os._exit(0)

    def _idle(self) -> bool:
        with self._counting:
            if self._connections or time.monotonic() - self._alone_since < self._idle_exit_s:
                return False
        return self._memory.wait_idle(0)

    def _answer(self, request: wire.Message) -> Answer:
        try:
            match request.get("op"):
                case "hello":
                    return {"pid": os.getpid(), "config": self._config.model_dump(mode="json")}, None
                case "quiet":
                    return {"others": self._others({*map(int, request["pids"])}, float(request["timeout_s"]))}, None
                case "check":
                    self._check()
                    return {}, None
                case "enter":
                    self._enter(request)
                    return {}, None
                case "only":
                    self._keep_only({*map(int, request["ranks"])})
                    return {}, None
        except HyperpodExtError as error:
            return {"error": error.to_json()}, None
        return super()._answer(request)

    def _others(self, pids: set[int], timeout_s: float) -> list[int]:
        """Processes that may still be saving, besides these; a dead one's last seal is waited for."""

        def others() -> list[int]:
            return sorted({pid for _, pid in self._writers} - pids)

        with self._writers_changed:
            self._writers_changed.wait_for(lambda: not others(), timeout_s)
            return others()

    def _check(self) -> None:
        """Raise where checkpoints could not be written: a bucket that is not there or denies, for example."""
        try:
            for drain in self._memory.drains:
                drain.checkpoints.store.check()
        except HyperpodExtError:
            if not self._memory.held():
                self._idle_exit_s = 0.0  # who mends the environment needs a server that has it
            raise

    def _enter(self, request: dict[str, Any]) -> None:
        """A generation of this node's ranks begins after step `base`; what older ones saved after `drop` goes."""
        generation, drop = int(request["generation"]), request["drop"]
        for drain in self._memory.drains:
            # between two runs it may have become another number of ranks, on another number of nodes
            drain.resize(*(int(request[key]) for key in ("node", "nodes", "owners")))
            drain.enter(generation, int(request["base"]), str(request["run"]), stored=())
        for regions in (self._memory.own, self._memory.replicas):
            regions.fence(generation, None if drop is None else int(drop))

    def _keep_only(self, ranks: set[int]) -> None:
        """This node's ranks have several saves of their own by now: give back what ranks of earlier runs left."""
        left = [owner for owner in self._memory.own.owners() if owner not in ranks]
        if left and self._memory.wait_idle(0):  # nothing of theirs is being copied; else the next save asks again
            for owner in left:
                self._memory.own.drop(owner)


def main() -> None:
    parser = argparse.ArgumentParser(prog="hyperpod_ext.runtime.memory_server.standalone", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument("--node", type=int, default=0, help="number of this node")
    parser.add_argument("--lock", type=Path, required=True, help="lock file of whoever starts or ends a server here")
    parser.add_argument("--idle-exit-s", type=float, required=True, help="end after this long without a connection")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that training was started from may go
    config = RuntimeConfig.model_validate_json(os.environ[ENV_RUNTIME])
    memory = NodeMemory(
        config.checkpoint,
        job=config.name,
        secret=read_secret(Path(os.environ[ENV_SECRET_FILE])),
        node=arguments.node,
        nodes=config.nodes,
        owners=config.workers_per_node,
        usable_bytes=usable_bytes,
        group=own_group(),
    )
    LonelyServer(arguments.socket, memory, config, arguments.lock, arguments.idle_exit_s).serve()


if __name__ == "__main__":
    main()
