"""Starts the helper processes of a node, and detects the end of each child process at once, by its pidfd."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.processes import children, send_signal
from hyperpod_ext.runtime.ipc.connections import open_over

_QUOTED = 3
"""Number of last lines of a process's output that an error message quotes."""
_LISTEN_S = 5.0
"""Number of seconds to wait for the last output of an ended process."""


_FORK_S = 60.0
"""Number of seconds within which the fork server must fork a worker. A fork normally takes milliseconds."""

_KNOWN: set[int] = set()
"""Process ids of this process's children that `on_exit` watches, or will watch soon."""


def on_exit(pid: int, tell: Callable[[int], None]) -> None:
    """When the child process `pid` ends, reap it and call `tell` with its wait status, in the event loop. The child
    process may have ended before the call of `on_exit`."""
    loop = asyncio.get_running_loop()
    _KNOWN.add(pid)
    handle = os.pidfd_open(pid)

    def ended() -> None:
        loop.remove_reader(handle)
        os.close(handle)
        _KNOWN.discard(pid)
        with contextlib.suppress(ChildProcessError):  # the child was already reaped, during the node's shutdown
            tell(os.waitpid(pid, 0)[1])

    loop.add_reader(handle, ended)


def start_module(
    module: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    output: int | None = None,
) -> int:
    """Start `python -m module arguments` in its own session. Returns the process id.

    If this process has already imported the module and has only one thread, it forks the new process. Forking takes
    milliseconds; a fresh Python process needs seconds for its imports. A process with several threads must not fork,
    because another thread could hold a lock.

    Args:
        output: file descriptor for stdout and stderr of the new process; None to use stdout and stderr of this process.
    """
    loaded = sys.modules.get(module)
    if loaded is None or threading.active_count() > 1:
        command = [sys.executable, "-m", module.removesuffix(".__main__"), *arguments]
        process = subprocess.Popen(
            command, env=dict(environ), pass_fds=pass_fds, stdout=output, stderr=output, start_new_session=True
        )
        return process.pid
    if pid := os.fork():
        return pid
    become_module(loaded, arguments, environ, pass_fds=pass_fds, output=output)


def become_module(
    module: ModuleType,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    output: int | None = None,
) -> NoReturn:
    """Run `module.main()` in this forked process, as `python -m` would run it in a new process."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        # keep ignoring SIGINT in a process that was started with `nohup ... &`
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        # never garbage-collect objects of the parent process, because collecting them could close reused file
        # descriptors
        gc.freeze()
        _close_all_but({0, 1, 2, *pass_fds})
        # copy `environ` before `os.environ` is cleared, because both may be the same object
        environ = dict(environ)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = [str(module.__file__), *arguments]
        tempfile.tempdir = None  # make `tempfile` read TMPDIR again, which may have changed
        sys.path[:0] = ["", *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
        module.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (only the names are needed)
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the file descriptor with which the folder was listed is closed already
                os.close(int(name))


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return os.getsid(0)


_MEMORY_SERVER = "hyperpod_ext.runtime.memory_server.__main__"


class MemoryServer:
    """The agent's side of the memory server, a child process that keeps snapshots in memory. The memory server imports
    its modules when it starts, and answers requests only after `begin`. The memory server's output is copied to stderr
    of the agent."""

    silent = ""
    """Why this agent killed the server (for how long the server did not answer); empty if the agent has not killed
    it."""
    is_gone = False
    """Whether the agent has handled the end of the server process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        (reading, self.orders), (self.output, writing) = os.pipe(), os.pipe()
        arguments = ["--orders", str(reading), "--parent", str(os.getpid())]
        self.pid = start_module(_MEMORY_SERVER, arguments, environ, pass_fds=[reading], output=writing)
        os.close(reading)
        os.close(writing)

    def begin(self, path: Path, later: Path, node: int, environ: Mapping[str, str]) -> None:
        """Order the memory server to answer requests at the Unix socket `path`. The agent may later rename the socket
        file to `later`."""
        arguments = ["--socket", str(path), "--later", str(later), "--node", str(node), "--parent", str(os.getpid())]
        text = json.dumps({"arguments": arguments, "environ": dict(environ)})
        self._lines: deque[str] = deque(maxlen=_QUOTED)
        self._listening = threading.Thread(target=self._listen, args=(text,), name="hpx-memory-words", daemon=True)
        self._listening.start()

    def _listen(self, order: str) -> None:
        # a BrokenPipeError means that the server has ended, which `on_exit` reports
        with contextlib.suppress(BrokenPipeError), os.fdopen(self.orders, "w") as orders:
            # this call blocks until the server reads, if the text is longer than 64 KiB (the size of a pipe)
            orders.write(order)
        with os.fdopen(self.output, errors="replace") as lines:
            for line in lines:
                sys.stderr.write(line)
                sys.stderr.flush()
                self._lines.append(line.strip())

    async def last_log_line(self) -> str:
        """Return the last lines of the ended server's output, joined by ` / `."""
        await asyncio.to_thread(self._listening.join, _LISTEN_S)
        return " / ".join(line for line in self._lines if line)


class ForkServerEndedError(JobFailedError):
    """Raised if the fork server has ended."""


class ForkServer:
    """The agent's side of a fork server, a process that has imported all modules and forks workers. `connect` and
    `ready` must be called before `fork`."""

    def __init__(self, preload: Sequence[str], environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        line = theirs.fileno()
        arguments = [str(os.getpid()), str(line), *preload]
        self.pid = start_module("hyperpod_ext.runtime.agent.fork_server", arguments, environ, pass_fds=[line])
        theirs.close()
        self._asking = asyncio.Lock()
        self.is_ready = False
        """Whether the process has imported all modules and can fork workers."""
        self.notes: tuple[str, ...] = ()
        """One sentence for each module in `restart.preload` that could not be imported in advance (or only in part),
        with the reason."""
        self._spares: dict[int, int | Callable[[int], None] | None] = {}
        """Maps the process id of each warm spare (a process with a CUDA context that can become a worker) to the
        callback for the process's end, or to the wait status of an ended process. The value is None for a warm spare
        with neither a callback nor a wait status."""

    async def connect(self, environ: Mapping[str, str]) -> None:
        """Connect the fork server to this event loop. `environ`: environment variables of every worker, in addition to
        the fork server's variables."""
        self._reader, self._writer = await open_over(self._socket)
        self._environ = environ

    async def ready(self) -> float:
        """Wait until the fork server has imported its modules. Returns the number of seconds that the imports took.

        Raises:
            JobFailedError: a module could not be imported, or the fork server has ended.
        """
        answer = await self._answer()
        seconds, self.notes = float(answer["ready"]), tuple(answer.get("notes", ()))
        self.is_ready = True
        return seconds

    async def fork(self, *, argv: list[str], env: Mapping[str, str], cwd: Path, log: Path) -> tuple[int, bool]:
        """Start a worker: fork a process, or use a warm spare. Returns the worker's process id, and whether the worker
        was a warm spare. The worker is a child of the agent process.

        Raises:
            JobFailedError: the fork failed, or the fork server has ended.
        """
        answer = await self._ask({"argv": argv, "env": {**self._environ, **env}, "cwd": str(cwd), "log": str(log)})
        return int(answer["pid"]), bool(answer["warm"])

    async def adopt_orphans(self) -> None:
        """Watch orphans (child processes of dead workers), and reap each orphan when it ends. An orphan may run until
        the node shuts down, for example to upload logs."""
        # no worker is forked while this code holds the lock, so every existing worker is in `_KNOWN`
        async with self._asking:
            # skip children in this process's session, for which other code waits
            orphans = [pid for pid in children(os.getpid()) if pid not in _KNOWN and _session_of(pid) != os.getsid(0)]
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    on_exit(pid, lambda status: None)

    async def keep_warm(self, local_ranks: Sequence[int]) -> None:
        """Keep a warm spare (a process with a CUDA context) ready for each local rank, if this node has GPUs.

        Raises:
            JobFailedError: the fork server has ended.
        """
        answer = await self._ask({"keep_warm": list(local_ranks)})
        for pid in answer["pids"]:
            self._spares[pid] = None
            on_exit(pid, functools.partial(self._spare_ended, pid))

    def on_exit(self, pid: int, tell: Callable[[int], None]) -> None:
        """When the worker `pid`, which `fork` returned, ends, call `tell` with its wait status."""
        if pid not in self._spares:
            on_exit(pid, tell)
        elif isinstance(ended := self._spares[pid], int):
            del self._spares[pid]
            tell(ended)
        else:
            self._spares[pid] = tell

    def _spare_ended(self, pid: int, status: int) -> None:
        tell = self._spares[pid]
        if callable(tell):
            del self._spares[pid]
            tell(status)
        else:
            self._spares[pid] = status

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._asking:
            self._writer.write(json.dumps(request).encode() + b"\n")
            try:
                async with asyncio.timeout(_FORK_S):
                    answer = await self._answer()
            except TimeoutError:
                # kill a fork server that does not answer (for example after SIGSTOP), so that it is replaced
                send_signal(self.pid)
                raise ForkServerEndedError(
                    f"the process that forks workers forked no worker within {_FORK_S:g} s"
                ) from None
            _KNOWN.update([answer["pid"]] if "pid" in answer else answer["pids"])
            return answer

    async def _answer(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        if not line:
            # kill the fork server, in case only the connection to it is broken
            send_signal(self.pid)
            raise ForkServerEndedError(
                "the process that forks workers ended", hint="Look at its last lines of output in the node's log."
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise JobFailedError(str(answer["error"]))
        return answer


class Prepared(NamedTuple):
    """Helper processes that were started before the agent knew which job it belongs to."""

    fork_server: ForkServer
    memory_server: MemoryServer
