"""A process that is killed is known to die before its memory is free, and nothing else is taken for that."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.runtime.detection.death_watch import LivenessLock, dying_of
from hyperpod_ext.runtime.detection.heartbeat import HeartbeatPage

PATIENCE_S = 20.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], tuple[Any, LivenessLock]]]:
    """A function that starts a process which holds a liveness lock and then does what it is given; it has said so."""
    path, made = tmp_path / "page", list[Any]()
    HeartbeatPage.create(path)

    def start_process(does: str) -> tuple[Any, LivenessLock]:
        lock = LivenessLock(path)
        lock.prepare()
        lines = f"""
            import os, signal, sys, threading, time
            from pathlib import Path
            from hyperpod_ext.runtime.detection.death_watch import LivenessLock
            LivenessLock(Path({str(path)!r})).hold()
            """
        code = textwrap.dedent(lines) + textwrap.dedent(does)
        made.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        assert made[-1].stdout.readline() == b"ready\n"
        return made[-1], lock

    yield start_process
    for process in made:
        process.kill()
        process.wait()


def has_ended(pid: int, within_s: float) -> bool:
    handle = os.pidfd_open(pid)
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def test_a_kill_is_known_while_the_memory_of_the_process_is_given_back(start):
    known_before_the_end = False
    for _ in range(5):  # on a busy machine, we may be the last to run
        process, lock = start("""
            memory = bytearray(1 << 30)
            memory[:: 4096] = bytes(1 << 18)
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            print("ready", flush=True)
            signal.pause()
        """)
        process.kill()
        assert lock.wait()
        while (status := dying_of(process.pid)) is None:
            pass  # its other thread is on its way
        known_before_the_end = not has_ended(process.pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert has_ended(process.pid, PATIENCE_S)
        assert process.wait() == -signal.SIGKILL
        if known_before_the_end:
            break
    assert known_before_the_end, "a GiB takes longer"


def test_a_process_that_exits_by_itself_is_not_said_to_be_killed(start):
    process, lock = start("""
        print("ready", flush=True)
        os._exit(3)
    """)
    assert lock.wait()
    assert has_ended(process.pid, PATIENCE_S)
    assert dying_of(process.pid) is None, "it has ended, and nobody has asked for its status yet"
    assert process.wait() == 3
    assert dying_of(process.pid) is None, "there is no such process"


@pytest.mark.parametrize(
    "does",
    [
        'os.execvp("sleep", ["sleep", "600"])',
        # its main thread ends, another one goes on
        """
        threading.Thread(target=time.sleep, args=(600,)).start()
        import ctypes
        ctypes.CDLL(None).pthread_exit(None)
        """,
    ],
    ids=["another program", "main thread alone"],
)
def test_a_process_that_lives_on_is_not_said_to_die(start, does):
    process, lock = start('print("ready", flush=True)\n' + textwrap.dedent(does))
    assert lock.wait()
    assert dying_of(process.pid) is None
    assert not has_ended(process.pid, 0.2)
    assert dying_of(process.pid) is None
