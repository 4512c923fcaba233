"""`hp-ext` as a process that is forked from one with everything imported, and so is all that a local job of it starts.

What runs is the product's code, from the same entry points, and `/proc` shows each process as if it had been executed:
its command line and its environment are what tests, and the product itself, find processes by. Imported by `warm`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import hyperpod_ext.jobs.local.engine as local_engine
import hyperpod_ext.jobs.local.nodes as local_nodes
import hyperpod_ext.jobs.local.target as local_target
from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.agent import __main__ as agent
from hyperpod_ext.runtime.agent import children

MODULE = "warm_terminal"
TOLD = Path(__file__).with_name("told.sh")
_ARGUMENTS, _ENVIRONMENT = slice(47, 49), slice(49, 51)
"""Of /proc/self/stat: where in memory the kernel looks for them."""
_ENTRY = next(iter(entry_points(group="console_scripts", name="hp-ext")))
_ENTRY.load()
_ENGINE = ModuleType(local_engine.__name__)
_ENGINE.__file__, _ENGINE.main = local_engine.__file__, lambda: local_engine.main(sys.argv[1:])  # type: ignore[attr-defined]
_really_become = children.become_module


def show(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have /proc/self show these. `warm` has made room for them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = [int(field) for field in ["", "", *fields][_ARGUMENTS.start : _ENVIRONMENT.stop] if field]
    for begin, end, words in (
        (*places[:2], arguments),
        (*places[2:], [f"{name}={value}" for name, value in environ.items()]),
    ):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        assert len(text) <= end - begin, f"{len(text)} bytes have no room in {end - begin}"
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, len(text))


def _become(module: ModuleType, arguments: Sequence[str], environ: Mapping[str, str], **more: Any) -> NoReturn:
    name = module.__name__
    show([sys.executable, "-m", name.removesuffix(".__main__"), *arguments], environ)
    _really_become(module, arguments, environ, **more)


class _Forked:
    """What the engine needs of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)


def _start_node(node: local_nodes.NodeCommand, *, again: bool) -> _Forked:
    """As the engine does, without `exec`: `node.sh` says what it would run, and the fork becomes that."""
    node.log.parent.mkdir(parents=True, exist_ok=True)
    env = {**node.env, "HPX_REJOIN": "1"} if again else dict(node.env)
    parent = os.getpid()
    if pid := os.fork():
        return _Forked(pid)
    die_with_parent(parent)
    env |= {"HPX_PYTHON": str(TOLD), "HPX_TOLD_PYTHON": sys.executable}
    said = subprocess.run(node.command, env=env, stdout=subprocess.PIPE, check=True).stdout
    cwd, count, *words = map(os.fsdecode, said.split(b"\0")[:-1])
    arguments, variables = words[: int(count)], words[int(count) :]
    os.chdir(cwd)
    environ = dict(word.split("=", 1) for word in variables)
    environ["HPX_PYTHON"] = environ.pop("HPX_TOLD_PYTHON")
    log = os.open(node.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _become(agent, arguments[2:], environ, output=log)


def _start_engine(submission: Any, lock: int, source_dir: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HPX_")}
    environ = inherited | {"HPX_SOURCE_DIR": source_dir, "HPX_PYTHON": sys.executable}
    pid = os.fork()
    if pid == 0:
        log = os.open(submission.engine_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        _become(_ENGINE, [str(submission.folder), str(lock)], environ, pass_fds=[lock], output=log)
    assert os.waitpid(pid, 0)[1] == 0, submission.engine_log.read_text()


children.become_module = _become
local_nodes._start = _start_node  # type: ignore[assignment]
local_target._start_engine = _start_engine


def main() -> None:
    """The command of a user."""
    show([sys.executable, "hp-ext", *sys.argv[1:]], os.environ)
    for signum in (signal.SIGTERM, signal.SIGHUP):  # whatever the test run was started with
        signal.signal(signum, signal.SIG_DFL)
    _ENTRY.load()()
