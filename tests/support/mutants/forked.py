"""Runs of pytest in forks of this process, which has imported what is slow to import and nothing of the product.

Each run has a copy of the tree for itself. The mutated file is written into it, and the copy is what the run imports,
in its child processes too: it comes first on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutants.table import MOVED, ROOT

FAST = "not slow and not thorough and not soak and not sdks and not integrations"
_TEST_S = 40
"""What one test may take; a mutant may hang."""
_RUN_S = 240
"""What all tests of one run may take. No test that keeps to its own limit comes near."""
_MADE = ("build", "dist", "cdk.out", "*.egg-info", "__pycache__")
"""What is in a tree and is no part of it; hidden folders are none either, but for environments."""
_SLOW_IMPORTS = (
    "asyncio", "awscrt.checksums", "boto3", "click", "hypothesis.stateful", "jinja2", "numpy", "pydantic", "pytest",
    "rich.console", "rich.live", "rich.progress", "rich.table", "torch", "torch.distributed.checkpoint",
    "torch.distributed.device_mesh", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.parallel",
    "torch.utils.data", "yaml",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """Test files to run, with a file changed or none."""

    name: str
    tests: tuple[str, ...]
    path: str = ""
    text: str = ""
    whole: bool = False
    """Go on after a test that fails."""


@dataclass(slots=True)
class Result:
    """What became of one run."""

    task: Task
    code: int
    """Exit code of pytest; negative: the signal that ended it."""
    seconds: float
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    uncollected: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def tail(self) -> str:
        return "\n".join(self.output.rstrip().splitlines()[-25:])


def warm_up() -> None:
    """Import what tests import, for all runs to come."""
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    if any(name.partition(".")[0] == "hyperpod_ext" for name in sys.modules):
        raise RuntimeError("the product was imported before a fork: its mutants would not be seen")


def copy_tree(to: Path) -> None:
    """A tree that Python imports without an installation."""
    to.mkdir()
    for item in ROOT.iterdir():
        if item.name.startswith(".venv"):
            (to / item.name).symlink_to(item)
        elif item.is_file():
            shutil.copy2(item, to)
        elif not item.name.startswith(".") and not any(map(item.match, _MADE)):
            shutil.copytree(item, to / item.name, symlinks=True)
    for package, folder in MOVED.items():
        (to / package.replace(".", "/")).symlink_to(to / folder)


@contextmanager
def run_all(tasks: Iterable[Task], trees: list[Path]) -> Iterator[Iterator[Result]]:
    """Results as they come, as many at a time as there are trees; at the end of the block none is running."""
    results = _run_all(tasks, trees)
    try:
        yield results
    finally:
        results.close()


def _run_all(tasks: Iterable[Task], trees: list[Path]) -> Generator[Result, None, None]:
    waiting, free = list(tasks), list(trees)
    running: dict[int, _Run] = {}
    try:
        while waiting or running:
            while waiting and free:
                run = _Run(waiting.pop(0), free.pop())
                running[run.pid] = run
            for run in _ended(running.values()):
                del running[run.pid]
                yield run.result()
                free.append(run.tree)
    finally:
        for run in running.values():
            run.end()


def _ended(running: Iterable[_Run]) -> list[_Run]:
    """Those that have ended; waits for one, and ends those that take too long."""
    by_fd = {run.pidfd: run for run in running}
    poll = select.poll()
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    left_s = max(0.0, min(run.deadline for run in by_fd.values()) - time.monotonic())
    found = [by_fd[fd] for fd, _ in poll.poll(1000 * left_s)]
    return found or [run for run in by_fd.values() if run.deadline <= time.monotonic()]


class _Run:
    """One fork and its tree."""

    def __init__(self, task: Task, tree: Path) -> None:
        self.task, self.tree = task, tree
        self._began = time.monotonic()
        self._report, self._output = tree / "report.json", tree / "output.txt"
        self._report.unlink(missing_ok=True)
        self._put_back = self._change() if task.path else None
        sys.stdout.flush()
        assert threading.active_count() == 1, "a fork would take the locks of other threads along"
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._child())
        self.pidfd = os.pidfd_open(self.pid)
        self.deadline = self._began + _RUN_S

    def _change(self) -> Callable[[], None]:
        file = self.tree / self.task.path
        before, stat = file.read_bytes(), file.stat()
        file.write_text(self.task.text, encoding="utf-8")
        later = stat.st_mtime_ns + 10**12  # or bytecode of the right file would pass for that of this one
        os.utime(file, ns=(later, later))

        def put_back() -> None:
            file.write_bytes(before)
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

        return put_back

    def _child(self) -> int:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        with self._output.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.path[:] = [str(self.tree), *(one for one in sys.path if one and Path(one).resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(self.tree)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        os.chdir(self.tree)
        seen = _Seen(self.tree)
        import pytest

        options = ["-q", "-p", "no:cacheprovider", "-m", FAST, f"--timeout={_TEST_S}", "--tb=short"]
        options += [] if self.task.whole else ["-x"]
        code = int(pytest.main([*options, *self.task.tests], plugins=[seen]))
        self._report.write_text(json.dumps({"code": code, **seen.to_json()}))
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    def result(self) -> Result:
        """What became of it. A run that has not ended is ended."""
        status = self.end()
        found = Result(self.task, os.waitstatus_to_exitcode(status), time.monotonic() - self._began)
        found.output = self._output.read_text(errors="replace")
        if self._report.exists():
            for name, value in json.loads(self._report.read_text()).items():
                setattr(found, name, value)
        return found

    def end(self) -> int:
        """Whatever is left of it goes, and the tree is as it was."""
        with suppress(ProcessLookupError):  # it has ended before it made a group of its own
            os.killpg(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.pidfd)
        if self._put_back is not None:
            self._put_back()
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)  # examples of one mutant are no help to another
        return status


class _Seen:
    """A plugin of pytest that keeps what happened."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._passed = 0
        self._failed: list[str] = []
        self._uncollected: list[str] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._uncollected.append(report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed += 1

    def pytest_sessionfinish(self) -> None:
        product = sys.modules.get("hyperpod_ext")
        if product is not None and not str(product.__file__).startswith(f"{self._tree}/"):
            raise RuntimeError(f"{product.__file__} was imported, not the copy in {self._tree}")

    def to_json(self) -> dict[str, Any]:
        return {"passed": self._passed, "failed": self._failed, "uncollected": self._uncollected}
