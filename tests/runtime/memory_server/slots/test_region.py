"""Whose page faults make the memory of slots: the server's, once, and in huge pages where the system has such."""

from __future__ import annotations

import os
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import waiting

from hyperpod_ext.runtime.memory_server.client import client
from hyperpod_ext.runtime.memory_server.slots import region as regions
from hyperpod_ext.runtime.memory_server.slots.region import Region, map_memory, populate

NBYTES = 16 << 20


@pytest.fixture
def memory_fd() -> Iterator[int]:
    fd = os.memfd_create("slots")
    os.ftruncate(fd, NBYTES)
    yield fd
    os.close(fd)


def faults_of_reading(memory: memoryview) -> int:
    """Page faults of one read of each page."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    sum(memory[:: os.sysconf("SC_PAGE_SIZE")])  # a copy would fault for pages of its own
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def made(fd: int) -> int:
    """Bytes from the start on that the system has given."""
    return os.lseek(fd, 0, os.SEEK_HOLE)


def in_huge_pages(memory: memoryview) -> int:
    """Bytes of a mapping that are mapped by huge pages."""
    start = f"{regions._address(memory):x}-"
    maps = Path("/proc/self/smaps").read_text()
    (found,) = re.findall(rf"^{start}.*?^ShmemPmdMapped: *(\d+) kB", maps, re.MULTILINE | re.DOTALL)
    return int(found) << 10


@pytest.mark.parametrize("private", [False, True])
def test_who_maps_a_region_later_finds_its_pages_with_few_faults(private):
    region = Region("slots", NBYTES // 2, 2)
    try:
        waiting.until(lambda: not region.untouched)
        if not (huge := in_huge_pages(region.memory)):
            pytest.skip("this system has no huge pages now, or none for shared memory (Linux 6.1)")
        small = NBYTES - huge
        most = 8 + huge // (2 << 20) + small // (64 << 10)  # of small ones, the kernel maps 16 at a time
        assert faults_of_reading(map_memory(region.fd, region.nbytes, private=private)) <= most
    finally:
        region.close()


def test_what_is_written_before_and_while_memory_is_made_stays(memory_fd):
    memory, other = map_memory(memory_fd, NBYTES), map_memory(memory_fd, NBYTES)
    expected = os.urandom(NBYTES)
    memory[: NBYTES // 2] = expected[: NBYTES // 2]

    def write(start: int, end: int) -> bool:
        writer.start()
        return True

    def go_on() -> None:
        for at in range(NBYTES // 2, NBYTES, 4096):
            other[at : at + 4096] = expected[at : at + 4096]

    writer = threading.Thread(target=go_on)
    populate(memory, write)
    writer.join()
    assert bytes(memory) == bytes(other) == expected


def test_memory_is_made_where_there_are_no_huge_pages(memory_fd, monkeypatch):
    monkeypatch.setattr(regions, "_MADV_COLLAPSE", -1)  # as a kernel that has none of it answers
    populate(map_memory(memory_fd, NBYTES))
    assert made(memory_fd) == NBYTES


def test_a_private_mapping_changes_nothing_for_others(memory_fd):
    shared, private = map_memory(memory_fd, NBYTES), map_memory(memory_fd, NBYTES, private=True)
    shared[0] = 1
    assert private[0] == 1
    private[0] = 2
    assert shared[0] == 1


def test_a_worker_makes_no_memory_but_follows_the_server(memory_fd, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(client, "_STOPPED_S", float("inf"))
    memory, may = map_memory(memory_fd, NBYTES), threading.Event()
    may.set()
    follower = threading.Thread(target=client._populate, args=(memory, os.dup(memory_fd), may), daemon=True)
    follower.start()
    waiting.until(lambda: len(slept) > 3)
    assert made(memory_fd) == 0
    populate(map_memory(memory_fd, NBYTES))
    waiting.until(lambda: not follower.is_alive())
    assert faults_of_reading(memory) <= 8  # of 4,096 pages; the interpreter's own memory may need a few


def test_a_worker_does_not_follow_for_ever(memory_fd, monkeypatch):
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=lambda seconds: None))
    may = threading.Event()
    may.set()
    client._populate(map_memory(memory_fd, NBYTES), os.dup(memory_fd), may)
    assert made(memory_fd) == 0


def test_what_is_read_while_a_region_is_closed_stays_readable():
    region = Region("slots", 4096, 2)
    with region.view(1, 4096) as view:
        view[:3] = b"abc"
        region.close()
        assert bytes(view[:3]) == b"abc"
