"""A bit that flips in what a memory server says of a snapshot: its manifest and its plan, which lie in no slot."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from served import JOB, SECRET
from small_job import MEMORY, PEER, SmallJob, trained
from stopped import stopped


def flip_in_heap(pid: int, text: bytes) -> int:
    """Flip one bit in the middle of every copy of `text` that a process has in memory of its own; how many there were.

    What is shared with other processes, such as slots, is left alone. The process has to be stopped: a thread that ends
    gives the memory of its stack back, and that could be read no longer.
    """
    found = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, flags, *_ = line.split()
            if flags != "rw-p":
                continue
            start, end = (int(part, 16) for part in place.split("-"))
            content = os.pread(memory.fileno(), end - start, start)
            for match in re.finditer(re.escape(text), content):
                at = match.start() + len(text) // 2
                os.pwrite(memory.fileno(), bytes([content[at] ^ 1]), start + at)
                found += 1
    return found


def harm(job: SmallJob, node: int, owner: int, step: int, what: str) -> None:
    """Flip a bit of what a node's memory server says of one snapshot."""
    server = job.servers[node]
    summary = next(one for one in server.ask("held")["snapshots"] if (one["rank"], one["step"]) == (owner, step))
    held = server.client().open(owner, summary["save_id"], secret=SECRET, job=JOB)
    text = {"checksum": held.manifest["crc64nvme"], "signature": held.manifest["signature"]}[what]
    with stopped(server.pid):
        assert flip_in_heap(server.pid, text.encode()) > 0


@pytest.mark.parametrize("what", ["checksum", "signature"])
def test_a_flipped_bit_in_a_manifest_in_memory_moves_all_ranks_to_the_peer_and_then_to_an_older_step(make_job, what):
    job = trained(make_job(MEMORY, PEER), 5)
    harm(job, 0, 0, 5, what)
    assert job.resume() == 5
    job.assert_holds(5)
    (refused,) = job.vote.errors
    assert (refused[0], ": not signed with this job's secret" in refused[1]) == (0, True)
    assert {event["source"] for event in job.vote.events if event["rank"] == 0} == {"peer"}

    harm(job, 1, 0, 5, what)
    assert job.resume() == 4
    job.assert_holds(4)
