"""How copies give way: nice values as numbers, and the group of a process as the kernel has it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import until

from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority, niceness_for


@pytest.mark.parametrize(("max_slowdown", "niceness"), [(1.0, 0), (0.8, 1), (0.25, 7), (0.05, 14), (0.001, 19)])
def test_the_nice_value_follows_from_what_training_may_lose(max_slowdown, niceness):
    assert niceness_for(max_slowdown) == niceness


@pytest.mark.parametrize("max_slowdown", [0.02, 0.06, 0.1, 0.5, 0.99])
def test_no_smaller_nice_value_would_do(max_slowdown):
    niceness = niceness_for(max_slowdown)
    assert 1.25**-niceness <= max_slowdown < 1.25 ** -(niceness - 1)


class Group:
    """Stands for /proc/self/autogroup; refuses as the kernel does, for as many times as it is told to."""

    def __init__(self, refusals: int = 0, number: int = errno.EAGAIN) -> None:
        self.written: list[int] = []
        self.refusals, self.refusal = refusals, OSError(number, os.strerror(number))

    def write_text(self, text: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise self.refusal
        self.written.append(int(text))


def test_the_group_gives_way_while_something_is_copied_and_nothing_is_sealed():
    group = Group()
    cpu_priority = CpuPriority(0.05, group)
    cpu_priority.copy_begins()
    cpu_priority.copy_begins()
    cpu_priority.copy_ends()
    with cpu_priority.urgent():
        assert group.written == [14, 0]
    cpu_priority.copy_ends()
    with cpu_priority.urgent():
        pass
    assert group.written == [14, 0, 14, 0]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE])
def test_what_the_kernel_refuses_for_now_is_told_later(number):
    group = Group(2, number)
    cpu_priority = CpuPriority(0.05, group)
    cpu_priority.copy_begins()
    until(lambda: group.written == [14])
    group.refusals = 1
    cpu_priority.copy_ends()
    until(lambda: group.written == [14, 0])


def test_a_copy_that_takes_too_long_gives_way_no_more_and_the_next_one_does_again():
    group = Group()
    cpu_priority = CpuPriority(0.05, group)
    cpu_priority.timeout_s = 0.05
    cpu_priority.copy_begins()
    until(lambda: group.written == [14, 0])
    cpu_priority.timeout_s = 60.0
    cpu_priority.copy_ends()
    cpu_priority.copy_begins()
    assert group.written == [14, 0, 14]


def test_the_patience_with_copies_that_are_done_is_not_that_with_the_next():
    group = Group()
    cpu_priority = CpuPriority(0.05, group)
    cpu_priority.copy_begins()
    late = cpu_priority._timer
    cpu_priority.copy_ends()
    cpu_priority.copy_begins()
    late.function()  # it was cancelled when it had just begun
    assert group.written == [14, 0, 14]
    cpu_priority._timer.function()
    assert group.written == [14, 0, 14, 0]


def test_unthrottled_copies_keep_the_priority_of_the_process_until_they_are_done():
    group = Group()
    cpu_priority = CpuPriority(0.05, group)
    cpu_priority.copy_begins()
    cpu_priority.unthrottle()
    cpu_priority.copy_begins()
    assert group.written == [14, 0]
    for _ in range(2):
        cpu_priority.copy_ends()
    cpu_priority.copy_begins()
    assert group.written == [14, 0, 14]


def test_a_kernel_without_groups_is_asked_once(tmp_path: Path):
    cpu_priority = CpuPriority(0.05, tmp_path / "not" / "there")
    cpu_priority.copy_begins()
    cpu_priority.copy_ends()
    assert cpu_priority._group is None


@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) > 14, reason="a nice process may not make a thread less nice")
def test_only_the_copying_thread_is_nice():
    found: list[int] = []

    def copy() -> None:
        CpuPriority(0.05).lower_this_thread()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert found == [14]
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


_IN_A_SESSION = """
import time
from hyperpod_ext.runtime.memory_server.replication.cpu_priority import CpuPriority, own_group
group = own_group()
cpu_priority = CpuPriority(0.05, group)
cpu_priority.copy_begins()
until = time.monotonic() + 20
while group and cpu_priority._written != 14 and time.monotonic() < until:
    time.sleep(0.01)  # without CAP_SYS_ADMIN the kernel takes one such word in 0.1 s, from anybody
print(group and group.read_text().split()[-1])
"""


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel makes no groups of sessions")
@pytest.mark.parametrize(("own_session", "niceness"), [(True, "14"), (False, "None")])
def test_a_session_of_its_own_gives_way_as_a_whole(own_session, niceness):
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_SESSION], start_new_session=own_session, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == niceness, done.stderr
