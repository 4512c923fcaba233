"""What is ended, and what has time to remove what others left."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from hyperpod_ext.processes import children, wait_readable

SCENE = """
import os, subprocess, sys
from pathlib import Path
from hyperpod_ext.processes import become_subreaper, children, kill_descendants, kill_group, kill_started_for
WORKER = '''
import subprocess, sys
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=4096)
subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
subprocess.Popen(["true"], stdout=subprocess.DEVNULL)
print(segment.name, flush=True)
sys.stdin.read()
'''
become_subreaper()

def worker():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = subprocess.Popen([sys.executable, "-c", WORKER], start_new_session=True, **pipes)
    return started, Path("/dev/shm") / started.stdout.readline().strip()
"""


def run(scene: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCENE + scene], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_segments_of_shared_memory_go_with_those_that_made_them() -> None:
    run("""
first, segment = worker()
assert segment.exists()
assert first.pid in kill_descendants(os.getpid())
assert not segment.exists()
assert children(os.getpid()) == []
""")


def test_one_that_is_spared_keeps_all_that_is_its_own() -> None:
    run("""
(one, its), (other, others) = worker(), worker()
one.kill()
one.wait()
kill_descendants(os.getpid(), spare=[other.pid])
assert not its.exists() and others.exists()
assert children(os.getpid()) == [other.pid]
kill_descendants(os.getpid())
assert not others.exists()
""")


def test_a_group_is_ended_without_whoever_removes_what_it_leaves() -> None:
    run("""
one, segment = worker()
# looked for now: once it is left alone it may end at any moment, and has no command line then
(tracker,) = [pid for pid in children(one.pid) if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
kill_group(one.pid)
one.wait()
os.waitpid(tracker, 0)
assert not segment.exists()
""")


def test_what_was_started_for_a_folder_is_ended_and_whoever_removes_what_it_leaves_is_the_last(tmp_path) -> None:
    run(f"""
os.environ["HPX_RUN_DIR"] = "{tmp_path}/run"
one, segment = worker()
kill_started_for(Path("{tmp_path}"))
assert not segment.exists()
""")


def test_a_process_that_must_be_killed_to_end_is_killed() -> None:
    """One that only looks like those that remove what others left does not hold us up for ever."""
    run("""
command = [sys.executable, "-c", "import time; 'multiprocessing.resource_tracker'; time.sleep(600)"]
started = subprocess.Popen(command)
assert kill_descendants(os.getpid()) == [started.pid]
""")


def test_one_that_ends_while_its_children_are_looked_for_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> NoReturn:
        raise FileNotFoundError

    monkeypatch.setattr(os, "scandir", gone)
    monkeypatch.setattr(os, "listdir", gone)
    assert children(os.getpid()) == []


LOOK = """
import os, sys
from hyperpod_ext.cli import main
out = sys.argv.pop()
try:
    main()
finally:
    with open(out, "w") as file:
        file.write(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_that_is_started_without_output_opens_no_file_in_its_place(closed: str, tmp_path: Path) -> None:
    """What is printed would go to that file, and the job's engine was killed by what is closed in a new process."""
    found = tmp_path / "found"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", LOOK, found]
    subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert found.read_text().split() == ["/dev/null"] * 3


@pytest.mark.parametrize("takes", [True, False])
def test_a_signal_that_comes_when_the_loop_has_closed_ends_no_process_that_still_cleans_up(takes: bool) -> None:
    scene = f"""
import asyncio, os, signal
from hyperpod_ext.processes import take_signals_from

async def main():
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, lambda: None)
    if {takes}:
        take_signals_from(loop, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)

asyncio.run(main())
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", scene], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if takes else -signal.SIGTERM), done.stderr


PRINT = """
import os, sys
from hyperpod_ext.standard_streams import lose_unwritable_output
lose_unwritable_output()
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
os.dup2(1, 2)
for _ in range(3):
    print("lost", flush=True)
    sys.stderr.write("lost")
os.dup2(file, 1)
print("kept", flush=True)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_a_full_disk_does_not_take_is_lost_and_counted_and_ends_nothing(
    unbuffered: str, tmp_path: Path
) -> None:
    (log := tmp_path / "log").touch()
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    subprocess.run([sys.executable, "-c", PRINT, log], check=True, env=env)
    assert log.read_text() == "\nhyperpod_ext: 15 bytes of output were lost here: No space left on device\nkept\n"


def test_a_descriptor_above_those_of_select_can_be_waited_for() -> None:
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1024)
    assert not wait_readable(high, 0)
    os.close(writing)
    assert wait_readable(high), "its end can be read"
    for each in (reading, high):
        os.close(each)


@pytest.mark.parametrize("sends", [0, 1, 10**9])
def test_a_signal_is_passed_on_at_any_time(sends: int) -> None:
    """The signal may arrive before the wait. Signals that arrive while the process exits do not change its exit code.
    A child without a signal ends by itself."""
    run(f"""
import signal, time
from hyperpod_ext.processes import wait_and_forward
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
child = os.fork()
if child == 0:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.execvp("sleep", ["sleep", "{600 if sends else 0}"])
parent = os.getpid()
if os.fork() == 0:
    for _ in range({sends}):
        if os.getppid() != parent:
            break
        os.kill(parent, signal.SIGTERM)
        time.sleep(0.0001)  # without it, the process does nothing but receive them
    os._exit(0)
status = wait_and_forward(child, signal.SIGTERM)
assert status == {"signal.SIGTERM" if sends else 0}, status
""")
