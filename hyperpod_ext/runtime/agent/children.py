"""Starting a node's helper processes, and hearing of any child's death at once, through pidfds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hyperpod_ext.errors import JobFailedError


def on_exit(pid: int, tell: Callable[[int], None]) -> None:
    """Call `tell(status)` in the event loop when child `pid` ends, and reap it. Works for one that has ended."""
    loop = asyncio.get_running_loop()
    handle = os.pidfd_open(pid)

    def ended() -> None:
        loop.remove_reader(handle)
        os.close(handle)
        with contextlib.suppress(ChildProcessError):  # reaped when the whole node was ended
            tell(os.waitpid(pid, 0)[1])

    loop.add_reader(handle, ended)


def start_memory_server(path: Path, node: int, environ: Mapping[str, str]) -> int:
    """Start this node's memory server; returns its process id."""
    arguments = ["--socket", str(path), "--node", str(node), "--parent", str(os.getpid())]
    return start_module("hyperpod_ext.runtime.memory_server.__main__", arguments, environ)


def start_module(
    module: str, arguments: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> int:
    """Start `python -m module arguments` in a session of its own; returns its process id.

    Where this process has imported the module already, the new one is forked from it, and imports nothing again. So an
    agent that was itself forked from a process with everything imported starts its helpers in milliseconds.
    """
    loaded = sys.modules.get(module)
    if loaded is None:
        command = [sys.executable, "-m", module.removesuffix(".__main__"), *arguments]
        return subprocess.Popen(command, env=dict(environ), pass_fds=pass_fds, start_new_session=True).pid
    if pid := os.fork():
        return pid
    become_module(loaded, arguments, environ, pass_fds)


def become_module(
    module: ModuleType, arguments: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> NoReturn:
    """Run `module.main()` in this process, which has just been forked, as `python -m` would in a new one."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a process started with `nohup ... &` ignores it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()  # objects of the parent stay as they are: what they would close has another owner here
        _close_all_but({0, 1, 2, *pass_fds})
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = [str(module.__file__), *arguments]
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
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (a path object for each would be made for nothing)
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))


class Zygote:
    """The agent's end of the zygote: ask for a worker, get its process id."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid, self._reader, self._writer = pid, reader, writer
        self._asking = asyncio.Lock()

    @classmethod
    async def start(cls, preload: tuple[str, ...], environ: Mapping[str, str]) -> Zygote:
        """Start it; its imports go on beside whatever the caller does next."""
        ours, theirs = socket.socketpair()
        line = theirs.fileno()
        arguments = [str(os.getpid()), str(line), *preload]
        pid = start_module("hyperpod_ext.runtime.agent.zygote", arguments, environ, [line])
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(pid, reader, writer)

    async def ready(self) -> float:
        """Wait for the imports; returns the seconds they took.

        Raises:
            JobFailedError: a module could not be imported.
        """
        return float((await self._answer())["ready"])

    async def fork(self, *, argv: list[str], env: Mapping[str, str], cwd: Path, log: Path) -> int:
        """Process id of a new worker, whose parent is this process."""
        async with self._asking:
            order = {"argv": argv, "env": dict(env), "cwd": str(cwd), "log": str(log)}
            self._writer.write(json.dumps(order).encode() + b"\n")
            return int((await self._answer())["pid"])

    async def _answer(self) -> dict[str, Any]:
        line = await self._reader.readline()
        if not line:
            raise JobFailedError("the process that forks workers ended", hint="The node's log has its last words.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise JobFailedError(str(answer["error"]))
        return answer
