"""Processes of the product that are forked from one that has imported everything, instead of importing it again.

What runs is the same code, from the same entry point; only the imports are shared. One such process serves a whole
test run. Tests that look at memory, or at a start itself, start their processes cold: `HPX_TEST_COLD=1` has all do so.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import whole_run

from hyperpod_ext.processes import wait_readable

AGENT = "hyperpod_ext.runtime.agent.__main__"
MEMORY_SERVER = "hyperpod_ext.runtime.memory_server.__main__"
OPERATOR_API = "hyperpod_ext.runtime.operator_api.__main__"
S3 = "hyperpod_ext.runtime.storage.s3_requests"
LIGHT = (MEMORY_SERVER, "awscrt.checksums", "cryptography.hazmat.primitives.ciphers", S3)
"""What a memory server needs."""
WHOLE = (
    *LIGHT,
    AGENT,
    OPERATOR_API,
    "hyperpod_ext.runtime.agent.fork_server",
    "hyperpod_ext.runtime.training.loop",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
)
"""What a node of a job needs."""
_LONGEST_ORDER = 1 << 20
_ROOM = "_" * (1 << 14)
"""Makes room for the command line and the environment that a process may show in /proc."""
_END = struct.Struct("id")
"""Exit status and CPU seconds."""


class Forked:
    """A process that the warm one has forked; used as a `subprocess.Popen` is."""

    cpu_s = 0.0
    """What all of them have computed, those that they have waited for included."""
    running: ClassVar[set[int]] = set()
    """Process ids of those that have not been seen to end."""

    def __init__(self, pid: int, handle: int, ended: int, args: Sequence[str]) -> None:
        self.pid, self.args = pid, list(args)
        self.running.add(pid)
        self.returncode: int | None = None
        self._handle = handle
        """Its pidfd, of the process that forked it: it may have ended by now, and have been waited for."""
        self._ended = ended
        """Pipe that gets the exit status."""

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            try:
                signal.pidfd_send_signal(self._handle, signum)
            except ProcessLookupError:  # it has just ended
                self.wait()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and wait_readable(self._ended, timeout):
            told = os.read(self._ended, _END.size)
            os.close(self._ended)
            os.close(self._handle)
            assert told, "the process that forks others ended"
            status, cpu_s = _END.unpack(told)
            Forked.cpu_s += cpu_s
            self.running.discard(self.pid)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def start(
    module: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    log: IO[bytes] | None = None,
    errors: IO[bytes] | None = None,
    cwd: Path | None = None,
    modules: Sequence[str] = WHOLE,
) -> Forked | subprocess.Popen[bytes]:
    """Run `python -m module` in this folder, its output to `log` (default: with ours), errors with it or apart."""
    if os.environ.get("HPX_TEST_COLD"):
        command = [sys.executable, "-m", module.removesuffix(".__main__"), *arguments]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent), env.get("PYTHONPATH", ""))))}
        return subprocess.Popen(command, env={**env, **own}, stdout=log, stderr=errors or log, cwd=cwd)
    line = _line(tuple(modules), os.getpid())
    reading, writing = os.pipe()
    outputs = [2 if log is None else log.fileno()]
    outputs.append(outputs[0] if errors is None else errors.fileno())
    order = {"module": module, "arguments": list(arguments), "environ": dict(env), "cwd": str(cwd or Path.cwd())}
    text = json.dumps(order).encode()
    assert len(text) < _LONGEST_ORDER
    socket.send_fds(line, [text], [*outputs, writing])
    os.close(writing)
    text, handles, _, _ = socket.recv_fds(line, 64, 1)
    assert text, "the process that forks others ended; its last words are above"
    return Forked(int(text), handles[0], reading, [module, *arguments])


def parent_of(modules: Sequence[str]) -> int:
    """Process id of what forks processes that need these modules."""
    return os.getpid() if os.environ.get("HPX_TEST_COLD") else int(_warm(tuple(modules))["pid"])


def _warm(modules: tuple[str, ...]) -> Any:
    """Process id and socket of the run's process that has these modules imported."""
    name = "warm-whole" if modules == WHOLE else "warm-" + hashlib.sha256(repr(modules).encode()).hexdigest()[:8]
    return whole_run.once(name, lambda: _start_warm(name, modules))


def _start_warm(name: str, modules: tuple[str, ...]) -> dict[str, Any]:
    """Start it; it ends with the test run."""
    path = whole_run.folder() / f"{name}.socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        command = [sys.executable, __file__, str(listening.fileno()), str(whole_run.alive()), *modules, _ROOM]
        process = subprocess.Popen(
            command,
            env=os.environ | {"HPX_TEST_ROOM": _ROOM},
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return {"pid": process.pid, "socket": str(path)}


@functools.cache
def _line(modules: tuple[str, ...], _of: int) -> socket.socket:
    """Our line to it: of each process one of its own."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(_warm(modules)["socket"])
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST_ORDER)
    atexit.register(line.close)
    return line


class _Server:
    """The warm process: forks for whoever is connected, and tells exit codes.

    Args:
        listening: where test processes connect.
        alive: can be read when the test run is over.
    """

    def __init__(self, listening: socket.socket, alive: int) -> None:
        self._listening, self._alive = listening, alive
        self._lines: dict[int, socket.socket] = {}
        self._children: dict[int, tuple[int, int]] = {}
        """By pidfd: process id, and the pipe for its exit status."""

    def serve(self) -> None:
        self._poll = select.poll()
        self._poll.register(self._alive, select.POLLIN)
        self._poll.register(self._listening, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._alive:
                    for handle in self._children:  # tests that were killed have left them
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                    return
                if descriptor in self._children:
                    self._reap(descriptor)
                elif descriptor in self._lines:
                    self._fork(descriptor)
                else:
                    line, _ = self._listening.accept()
                    self._lines[line.fileno()] = line
                    self._poll.register(line, select.POLLIN)

    def _fork(self, descriptor: int) -> None:
        line = self._lines[descriptor]
        text, descriptors, _, _ = socket.recv_fds(line, _LONGEST_ORDER, 3)
        if not text:
            self._poll.unregister(descriptor)
            self._lines.pop(descriptor).close()
            return
        *outputs, ended = descriptors
        pid = os.fork()
        if pid == 0:
            self._become(json.loads(text), outputs)
        for output in outputs:
            os.close(output)
        handle = os.pidfd_open(pid)
        self._children[handle] = pid, ended
        self._poll.register(handle, select.POLLIN)
        socket.send_fds(line, [str(pid).encode()], [handle])

    def _become(self, order: dict[str, Any], outputs: Sequence[int]) -> None:
        from hyperpod_ext.runtime.agent import children

        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
        os.chdir(order["cwd"])
        module = importlib.import_module(order["module"])  # what nearly all need is there
        children.become_module(module, order["arguments"], order["environ"])

    def _reap(self, handle: int) -> None:
        self._poll.unregister(handle)
        pid, ended = self._children.pop(handle)
        os.close(handle)
        _, status, used = os.wait4(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # nobody asks for it any longer
            os.write(ended, _END.pack(status, used.ru_utime + used.ru_stime))
        os.close(ended)


def main() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    alive = os.open(sys.argv[2], os.O_RDONLY)
    modules = sys.argv[3:-1]
    for module in modules:
        importlib.import_module(module)
    if "hyperpod_ext.runtime.agent.fork_server" in modules:
        importlib.import_module("hyperpod_ext.runtime.process_group.store").rehearse()
    importlib.import_module("hyperpod_ext.runtime.ipc.declared").build_all()
    if importlib.util.find_spec("botocore") is not None:  # another torch's environment does without
        sys.modules[S3]._make_client(1)  # so that what the client library reads from its files is read once
    gc.collect()
    gc.freeze()  # shared pages stay shared
    _Server(listening, alive).serve()


if __name__ == "__main__":
    main()
