"""What a node says of its own disks, where one of them does not answer."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from waiting import until

from hyperpod_ext.errors import UnreachableError
from hyperpod_ext.runtime.memory_server.node_disk import NodeDisk


class Disk:
    """A disk whose first answer waits for `answers`."""

    def __init__(self, url: str, error: str = "") -> None:
        self.url, self.tier, self.answers = url, SimpleNamespace(on_node=True, kind="disk"), threading.Event()
        self.checkpoints = self
        self.store = self
        self._error = error

    def check(self) -> None:
        assert self.answers.wait(100)
        if self._error:
            raise UnreachableError(self._error)

    def newest_generation(self) -> int:
        return 7

    def found(self) -> list[Any]:
        return []


def disks(*those: Disk, first_look_s: float = 100.0) -> NodeDisk:
    return NodeDisk(those, None, None, first_look_s)  # type: ignore[arg-type]


def test_a_disk_that_hangs_is_waited_for_once_and_counts_when_it_answers() -> None:
    disk = Disk("/nvme/j")
    node = disks(disk, first_look_s=0.01)
    hangs = {"snapshots": [], "generation": 0, "problems": ["/nvme/j has not answered in 0.01 s"]}
    assert [node.state(), node.state()] == [hangs, hangs]
    disk.answers.set()
    until(lambda: node.state() == {"snapshots": [], "generation": 7, "problems": []})


def test_a_disk_that_cannot_be_written_is_named_and_read_all_the_same() -> None:
    disk, other = Disk("/nvme/j", "Read-only file system"), Disk("/other/j")
    disk.answers.set()
    other.answers.set()
    problem = "checkpoints cannot be saved on this disk: Read-only file system"
    assert disks(disk, other).state() == {"snapshots": [], "generation": 7, "problems": [problem]}
