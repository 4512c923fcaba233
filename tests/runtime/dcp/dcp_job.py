"""Jobs of the tests: real ranks on real process groups, forked from one warm process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsdp2

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.protocol.requests import Handshake

HERE = Path(__file__).parent
_WITH_FSDP2 = {"save_torn", "save_and_flip", "save_in_background", "save_with_cached_plans", "save_whole"}
"""Scenes whose model is always sharded."""


class ForkServer:
    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "dcp_fork_server.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the fork server died"
        return line.strip()

    def fork(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]


class Running:
    """Ranks that run now."""

    def __init__(self, pids: list[int], results: list[Path]) -> None:
        self._pids, self._results = pids, results
        self._pidfds = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._pidfds.append(os.pidfd_open(pid))

    def kill(self) -> None:
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 100.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self._pidfds:
            ended, _, _ = select.select(self._pidfds[:1], [], [], max(0.0, deadline - time.monotonic()))
            assert ended, "a rank hangs:\n" + "\n".join(self._log(result) for result in self._results)
            os.close(self._pidfds.pop(0))

    def answers(self) -> list[dict[str, Any]]:
        """What each rank returned or raised."""
        self.wait()
        for result in self._results:
            assert result.exists(), f"a rank died\n{self._log(result)}"
        return [json.loads(result.read_text()) for result in self._results]

    @staticmethod
    def _log(result: Path) -> str:
        return result.with_suffix(".log").read_text(errors="replace")


class Job:
    """One job: its files, and the runs of its ranks, one after another."""

    def __init__(self, fork_server: ForkServer, directory: Path) -> None:
        self._fork_server, self.directory = fork_server, directory
        self.sockets = directory / "sockets"
        self._runs = 0
        self._running: list[Running] = []

    def start(self, scene: str, ranks: int = 2, nodes: int = 1, **arguments: Any) -> Running:
        if scene in _WITH_FSDP2 or arguments.get("kind") in ("fsdp", "hsdp"):
            fsdp2.skip_without_cpus()
        self._runs += 1
        environ = {
            "HPX_SOCKET_DIR": str(self.sockets),
            "XDG_STATE_HOME": str(self.directory / "state"),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks // nodes),
        }
        pids, results = [], []
        for rank in range(ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank % (ranks // nodes), "GROUP_RANK": rank // (ranks // nodes)}
            result = self.directory / f"run{self._runs}-rank{rank}.json"
            request = {
                "scene": scene,
                "arguments": arguments,
                "environ": {**environ, **{name: str(value) for name, value in own.items()}},
                "result": str(result),
                "init": f"file://{self.directory}/init{self._runs}",
            }
            pids.append(self._fork_server.fork(request))
            results.append(result)
        running = Running(pids, results)
        self._running.append(running)
        return running

    def run(self, scene: str, ranks: int = 2, nodes: int = 1, **arguments: Any) -> list[Any]:
        """What the ranks return; none may raise."""
        answers = self.start(scene, ranks, nodes, **arguments).answers()
        for rank, answer in enumerate(answers):
            assert "returned" in answer, f"rank {rank}: {answer['text']}"
        return [answer["returned"] for answer in answers]

    def servers(self) -> list[int]:
        """Process ids of the memory servers."""
        found = []
        for path in sorted(self.sockets.glob("*.socket")):
            with contextlib.suppress(OSError, JobFailedError):  # it has ended, or ends this moment
                client = MemoryClient(str(path))
                found.append(client.ask(Handshake()).pid)
                client.close()
        return found

    def lose_memory(self, node: int | None = None) -> None:
        """End the memory servers: what only they held is gone."""
        for pid in self.servers() if node is None else [self.servers()[node]]:
            handle = os.pidfd_open(pid)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [])  # who came meanwhile would still meet it
            os.close(handle)

    def close(self) -> None:
        for running in self._running:
            running.kill()
        self.lose_memory()
