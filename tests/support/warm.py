"""Processes of the product that are forked from one that has imported everything, instead of importing it again.

What runs is the same code, from the same entry point; only the imports are shared. One such process serves a whole
test run. Tests that look at memory, or at a start itself, start their processes cold: `HPX_TEST_COLD=1` has all do so.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
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
from typing import IO, Any, NamedTuple

AGENT = "hyperpod_ext.runtime.agent.__main__"
MEMORY_SERVER = "hyperpod_ext.runtime.memory_server.__main__"
LIGHT = (MEMORY_SERVER, "awscrt.checksums")
"""What a memory server needs."""
WHOLE = (
    *LIGHT,
    AGENT,
    "hyperpod_ext.runtime.agent.zygote",
    "hyperpod_ext.runtime.restart.loop",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
)
"""What a node of a job needs."""
_LONGEST_ORDER = 1 << 20


class Forked:
    """A process that the warm one has forked; used as a `subprocess.Popen` is."""

    def __init__(self, pid: int, ended: int, args: Sequence[str]) -> None:
        self.pid, self.args = pid, list(args)
        self.returncode: int | None = None
        self._ended = ended
        """Pipe that gets the exit status."""
        self._handle = os.pidfd_open(pid)

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
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            status = os.read(self._ended, 4)
            os.close(self._ended)
            os.close(self._handle)
            assert status, "the process that forks others ended"
            self.returncode = os.waitstatus_to_exitcode(struct.unpack("i", status)[0])
        return self.returncode


def start(
    module: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    log: IO[bytes] | None = None,
    modules: Sequence[str] = WHOLE,
) -> Forked | subprocess.Popen[bytes]:
    """Run `python -m module` in this folder, its output to `log` (default: with ours)."""
    if os.environ.get("HPX_TEST_COLD"):
        command = [sys.executable, "-m", module.removesuffix(".__main__"), *arguments]
        return subprocess.Popen(command, env=dict(env), stdout=log, stderr=log)
    line = _warm(tuple(modules)).line
    reading, writing = os.pipe()
    output = 2 if log is None else log.fileno()
    order = {"module": module, "arguments": list(arguments), "environ": dict(env), "cwd": str(Path.cwd())}
    text = json.dumps(order).encode()
    assert len(text) < _LONGEST_ORDER
    socket.send_fds(line, [text], [output, writing])
    os.close(writing)
    pid = int(line.recv(64) or b"0")
    assert pid, "the process that forks others ended; its last words are above"
    return Forked(pid, reading, [module, *arguments])


def parent_of(modules: Sequence[str]) -> int:
    """Process id of what forks processes that need these modules."""
    return os.getpid() if os.environ.get("HPX_TEST_COLD") else _warm(tuple(modules)).pid


class _Warm(NamedTuple):
    line: socket.socket
    pid: int


@functools.cache
def _warm(modules: tuple[str, ...]) -> _Warm:
    """A process that has these modules imported. It ends when this one closes its line, by its end at the latest."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST_ORDER)
    command = [sys.executable, __file__, str(theirs.fileno()), *modules]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return _Warm(ours, process.pid)


class _Server:
    """The warm process."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._children: dict[int, tuple[int, int]] = {}
        """By pidfd: process id, and the pipe for its exit status."""

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor in self._children:
                    poll.unregister(descriptor)
                    self._reap(descriptor)
                elif (handle := self._fork()) is not None:
                    poll.register(handle, select.POLLIN)
                else:
                    return

    def _fork(self) -> int | None:
        text, descriptors, _, _ = socket.recv_fds(self._line, _LONGEST_ORDER, 2)
        if not text:
            return None
        output, ended = descriptors
        pid = os.fork()
        if pid == 0:
            self._become(json.loads(text), output)
        os.close(output)
        handle = os.pidfd_open(pid)
        self._children[handle] = pid, ended
        self._line.send(str(pid).encode())
        return handle

    def _become(self, order: dict[str, Any], output: int) -> None:
        from hyperpod_ext.runtime.agent.children import become_module

        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(order["cwd"])
        become_module(sys.modules[order["module"]], order["arguments"], order["environ"])

    def _reap(self, handle: int) -> None:
        pid, ended = self._children.pop(handle)
        os.close(handle)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # nobody asks for it any longer
            os.write(ended, struct.pack("i", status))
        os.close(ended)


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    if "hyperpod_ext.runtime.agent.zygote" in sys.argv[2:]:
        importlib.import_module("hyperpod_ext.runtime.rendezvous.store").rehearse()
    _Server(line).serve()


if __name__ == "__main__":
    main()
