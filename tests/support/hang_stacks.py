"""Where a test that hangs stands: the stacks of all its processes are in its report, taken when its time is over.

A pytest plugin. Failing a test ends what it waits for, so that nothing can be seen of it afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import warm

from hyperpod_ext.processes import descendants

_LONGEST_S = 20.0
"""For one process: py-spy reads the symbols of its libraries."""


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[Any]:
    done = yield
    fail = signal.getsignal(signal.SIGALRM)

    def look_first(signum: int, frame: FrameType | None) -> None:
        item.add_report_section("call", "stacks", stacks([os.getpid(), *of_this_test()]))
        assert callable(fail)
        fail(signum, frame)

    if settings.method == "signal" and callable(fail):
        signal.signal(signal.SIGALRM, look_first)
    return done


def of_this_test() -> list[int]:
    """Processes that this one has started, and those that the warm one has forked for it, with theirs."""
    forked = [pid for parent in warm.Forked.running for pid in (parent, *descendants(parent))]
    return list(dict.fromkeys([*descendants(os.getpid()), *forked]))


def stacks(pids: Iterable[int]) -> str:
    return "\n\n".join(_stack(pid) for pid in pids)


def _stack(pid: int) -> str:
    """Of all threads of a process, Python's frames and those of libraries."""
    py_spy = str(Path(sys.executable).with_name("py-spy"))
    for native in (["--native"], []):  # there are platforms where it reads Python's frames alone
        command = [py_spy, "dump", "--pid", str(pid), *native]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"Process {pid}: {error}"
        if told.returncode == 0:
            return told.stdout
    return f"Process {pid}: {told.stderr.strip()}"
