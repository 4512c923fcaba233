"""The processes of one system: its host and its ranks, asked together, killed together."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.peers import Environment
from checkpoint.systems import System
from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import descendants

BENCH = Path(__file__).resolve().parents[1]
MEMORY = Path("/dev/shm")
FAIR = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # torch's store otherwise waits for the resolver
    "RES_OPTIONS": "timeout:1 attempts:1",
    # memory that was used stays mapped: page faults of activations are not what is measured
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
}
"""Environment of every process that is measured."""

Answer = dict[str, Any]
_LIGHT = 1 << 20


class BenchError(Exception):
    """The system, or the benchmark with it, did not do what was asked."""


@dataclass(frozen=True)
class Job:
    """What a group runs."""

    system: System
    kind: str
    nbytes: int
    world_size: int
    overlapped: bool = False
    replicas: int = 0
    sink: str = ""
    light: bool = False
    """Whether all ranks but the first have next to nothing to save."""


class Process:
    """One process that answers lines of JSON with lines of JSON."""

    def __init__(self, python: str, arguments: list[str], environ: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [python, *arguments],
                env=environ,
                cwd=BENCH,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self._rest = b""
        self.pid = self._process.pid

    def ask(self, op: str, **arguments: Any) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.error("is gone") from None

    def answer(self, deadline: float) -> Answer:
        assert self._process.stdout
        fd = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self.error("did not answer in time")
            more = os.read(fd, 65536)
            if not more:
                raise self.error("ended")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer

    def error(self, what: str) -> BenchError:
        words = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return BenchError(f"{what}: {words[-1][:300] if words else 'without a word'}")

    def kill(self) -> None:
        """SIGKILL it and all that it started."""
        for pid in [self.pid, *descendants(self.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()

    def quit(self, seconds: float = 20.0) -> None:
        """Let it end by itself; kill it if it does not."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(seconds)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self.kill()
        self._process.stdout.close()


class Group:
    """One system at work: `start` its ranks, `ask` all of them, `kill` them, and `start` those that come after."""

    def __init__(self, job: Job, environment: Environment | None, *, timeout_s: float = 120.0) -> None:
        self.job, self._patience = job, timeout_s
        self._python = str(environment.python) if environment else sys.executable
        self._logs = Path(tempfile.mkdtemp(prefix="bench-"))
        self._folder = Path(tempfile.mkdtemp(prefix="bench-", dir=MEMORY))
        self._place: Answer = {"world_size": job.world_size, "overlapped": job.overlapped, "replicas": job.replicas}
        self._place |= {"sink": job.sink, "folder": str(self._folder)}
        self.ranks: list[Process] = []
        self.described: list[Answer] = []
        self.host: Process | None = None
        self.host_pids: list[int] = []

    def __enter__(self) -> Group:
        """Start it, by the three steps that many groups can take beside each other."""
        try:
            self.start_host()
            self.start_ranks()
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_host(self) -> None:
        # the kernel ends a child with the thread that made it, so all are made by the main thread
        self.host = self._process("host", 0)

    def start_ranks(self) -> None:
        """All ranks anew; the host must be there."""
        if not self.host_pids:
            assert self.host
            told = self.host.answer(time.monotonic() + self._patience)
            self._place["host"], self.host_pids = told["told"], told["pids"]
        self._port = str(free_port())
        self.ranks = [self._process("rank", rank) for rank in range(self.job.world_size)]

    def wait_ready(self) -> None:
        """Until every rank has its state built and the system made."""
        self.described = self._answers()

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill() if sys.exc_info()[0] else process.quit()
        if self.host:
            self.host.quit()
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.rmtree(self._logs, ignore_errors=True)

    def start(self) -> None:
        """Those that come after the ranks that were killed."""
        self.start_ranks()
        self.wait_ready()

    def ask(self, op: str, **arguments: Any) -> list[Answer]:
        """The same of every rank; their answers in order."""
        for process in self.ranks:
            process.ask(op, **arguments)
        return self._answers()

    def ask_host(self, op: str, **arguments: Any) -> Answer:
        assert self.host
        self.host.ask(op, **arguments)
        return self.host.answer(time.monotonic() + self._patience)

    def kill(self) -> None:
        """kill -9 of every rank, and of what they started. The host stays."""
        pids = [pid for process in self.ranks for pid in [process.pid, *descendants(process.pid)]]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.ranks:
            process.kill()

    def _answers(self) -> list[Answer]:
        deadline = time.monotonic() + self._patience
        return [process.answer(deadline) for process in self.ranks]

    def _process(self, role: str, rank: int) -> Process:
        settings = {"role": role, "adapter": self.job.system.adapter, "kind": self.job.kind, "parent": os.getpid()}
        nbytes = _LIGHT if self.job.light and rank else self.job.nbytes
        settings |= {"nbytes": nbytes, "place": {**self._place, "rank": rank}}
        size = str(self.job.world_size)
        environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": getattr(self, "_port", "0")}
        environ = environment_of(environ | {"TMPDIR": str(self._logs)})
        arguments = ["-m", "checkpoint.worker", json.dumps(settings)]
        return Process(self._python, arguments, environ, self._logs / f"{role}{rank}.log")


def environment_of(more: dict[str, str]) -> dict[str, str]:
    """Of a process that is measured, or measured against."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HPX_")}
    return ours | FAIR | {"PYTHONPATH": str(BENCH)} | more
