"""Starting a node's helper processes, and hearing of any child's death at once, through pidfds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
    command = [sys.executable, "-m", "hyperpod_ext.runtime.memory_server"]
    arguments = ["--socket", str(path), "--node", str(node), "--parent", str(os.getpid())]
    return subprocess.Popen([*command, *arguments], env=dict(environ), start_new_session=True).pid


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
        command = [sys.executable, "-m", "hyperpod_ext.runtime.agent.zygote", str(os.getpid()), str(line), *preload]
        process = subprocess.Popen(command, env=dict(environ), pass_fds=[line], start_new_session=True)
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process.pid, reader, writer)

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
