"""Start a node's helper processes, and report a child's death at once through pidfds."""

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
"""Number of last output lines of a process that an error quotes."""
_LISTEN_S = 5.0
"""Seconds to wait for the last output of an ended process: the kernel closes its pipe when the process ends."""


_FORK_S = 60.0
"""Seconds within which a fork server must fork a worker. A fork normally takes milliseconds."""

_KNOWN: set[int] = set()
"""Children of this process that `on_exit` watches or is about to watch."""


def on_exit(pid: int, tell: Callable[[int], None]) -> None:
    """Call `tell(status)` in the event loop when child `pid` ends, and reap it. The child may have ended already."""
    loop = asyncio.get_running_loop()
    _KNOWN.add(pid)
    handle = os.pidfd_open(pid)

    def ended() -> None:
        loop.remove_reader(handle)
        os.close(handle)
        _KNOWN.discard(pid)
        with contextlib.suppress(ChildProcessError):  # the child was already reaped, while the node ended
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

    If this process has already imported the module, the new process is forked from this one and does not import again.
    So an agent that was itself forked, with all imports done, starts its helpers in milliseconds. A process with more
    than one thread is never forked, since another thread may hold a lock at that moment.

    Args:
        output: file descriptor for the new process's stdout and stderr. Default: stdout and stderr of this process.
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
    """Run `module.main()` in this newly forked process, as `python -m` would in a new process."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a process started with `nohup ... &` ignores SIGINT
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        # never collect the parent's objects: that would close descriptors whose numbers other files have here
        gc.freeze()
        _close_all_but({0, 1, 2, *pass_fds})
        environ = dict(environ)  # copy first: `environ` may be os.environ itself
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = [str(module.__file__), *arguments]
        tempfile.tempdir = None  # the new TMPDIR may differ
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
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (the names are enough; no path objects needed)
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
                os.close(int(name))


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return os.getsid(0)


_MEMORY_SERVER = "hyperpod_ext.runtime.memory_server.__main__"


class MemoryServer:
    """A child process that keeps snapshots in memory. The process imports its modules when it starts, and answers
    requests after `begin`. The server's output is forwarded to this process's stderr."""

    silent = ""
    """Why this agent killed the server because it did not answer; empty if it did not."""
    is_gone = False
    """Whether the end of the process has been handled."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        (reading, self.orders), (self.output, writing) = os.pipe(), os.pipe()
        arguments = ["--orders", str(reading), "--parent", str(os.getpid())]
        self.pid = start_module(_MEMORY_SERVER, arguments, environ, pass_fds=[reading], output=writing)
        os.close(reading)
        os.close(writing)

    def begin(self, path: Path, later: Path, node: int, environ: Mapping[str, str]) -> None:
        """Make the process serve at socket `path`. The socket may be renamed to `later`."""
        arguments = ["--socket", str(path), "--later", str(later), "--node", str(node), "--parent", str(os.getpid())]
        text = json.dumps({"arguments": arguments, "environ": dict(environ)})
        self._lines: deque[str] = deque(maxlen=_QUOTED)
        self._listening = threading.Thread(target=self._listen, args=(text,), name="hpx-memory-words", daemon=True)
        self._listening.start()

    def _listen(self, order: str) -> None:
        # `on_exit` reports the server's end
        with contextlib.suppress(BrokenPipeError), os.fdopen(self.orders, "w") as orders:
            orders.write(order)  # text above 64 KiB, the size of the pipe, blocks until the server has done its imports
        with os.fdopen(self.output, errors="replace") as lines:
            for line in lines:
                sys.stderr.write(line)
                sys.stderr.flush()
                self._lines.append(line.strip())

    async def last_log_line(self) -> str:
        """Return the last output lines of the ended process."""
        await asyncio.to_thread(self._listening.join, _LISTEN_S)
        return " / ".join(line for line in self._lines if line)


class ForkServerEndedError(JobFailedError):
    """The fork server has ended."""


class ForkServer:
    """The agent's side of a fork server. The process imports modules when it starts, and forks after `connect` and
    `ready`."""

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
        """Sentences on modules of `restart.preload` that are not preloaded, or only partly."""
        self._spares: dict[int, int | Callable[[int], None] | None] = {}
        """For each warm spare, the callback for its end or its exit status; None before either is known."""

    async def connect(self, environ: Mapping[str, str]) -> None:
        """Connect the fork server to this event loop. `environ`: environment variables for each worker, in addition to
        the fork server's own."""
        self._reader, self._writer = await open_over(self._socket)
        self._environ = environ

    async def ready(self) -> float:
        """Wait until the imports are done. Returns how many seconds they took.

        Raises:
            JobFailedError: a module could not be imported, or the fork server ended.
        """
        answer = await self._answer()
        seconds, self.notes = float(answer["ready"]), tuple(answer.get("notes", ()))
        self.is_ready = True
        return seconds

    async def fork(self, *, argv: list[str], env: Mapping[str, str], cwd: Path, log: Path) -> tuple[int, bool]:
        """Fork a worker, or use a warm spare as the worker. Returns the process id of the worker, which is a child of
        this process, and whether it was a warm spare.

        Raises:
            JobFailedError: the fork failed, or the fork server ended.
        """
        answer = await self._ask({"argv": argv, "env": {**self._environ, **env}, "cwd": str(cwd), "log": str(log)})
        return int(answer["pid"]), bool(answer["warm"])

    async def adopt_orphans(self) -> None:
        """Watch the processes that a dead worker left behind, and reap each when it ends. Such a process may run until
        the node ends, for example to send the last of a run's logs."""
        async with self._asking:  # take the lock, so that no fork is under way and every worker is in `_KNOWN`
            # skip children in this process's own session: other code waits for them
            orphans = [pid for pid in children(os.getpid()) if pid not in _KNOWN and _session_of(pid) != os.getsid(0)]
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    on_exit(pid, lambda status: None)

    async def keep_warm(self, local_ranks: Sequence[int]) -> None:
        """Keep a process with a CUDA context ready for each local rank, if this node has GPUs.

        Raises:
            JobFailedError: the fork server ended.
        """
        answer = await self._ask({"keep_warm": list(local_ranks)})
        for pid in answer["pids"]:
            self._spares[pid] = None
            on_exit(pid, functools.partial(self._spare_ended, pid))

    def on_exit(self, pid: int, tell: Callable[[int], None]) -> None:
        """Call `tell(status)` when a worker from `fork` ends, like the module's `on_exit`."""
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
            except TimeoutError:  # the process was stopped, for example; handle its end like any other
                send_signal(self.pid)
                raise ForkServerEndedError(f"the process that forks workers forked none within {_FORK_S:g} s") from None
            _KNOWN.update([answer["pid"]] if "pid" in answer else answer["pids"])
            return answer

    async def _answer(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        if not line:
            send_signal(self.pid)  # kill the process in case only the connection broke
            raise ForkServerEndedError(
                "the process that forks workers ended", hint="Look at its last lines of output in the node's log."
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise JobFailedError(str(answer["error"]))
        return answer


class Prepared(NamedTuple):
    """Helper processes of a node, started before it has a rank."""

    fork_server: ForkServer
    memory_server: MemoryServer
