"""The memory server as a process of its own: what it holds outlives whoever wrote it."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import JOB, SECRET, Served, Writer, answers, environ_of, plan_of, serve
from waiting import until

from hyperpod_ext.errors import (
    CorruptSnapshotError,
    HyperpodExtError,
    MemoryTierFullError,
    NotFoundError,
    StaleGenerationError,
)
from hyperpod_ext.runtime.agent.children import MemoryServer
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.protocol.requests import Held, WaitIdle
from hyperpod_ext.runtime.memory_server.slots.budget import Budget
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.snapshot.manifest import check_bytes

MEMORY = {"kind": "memory", "budget_mib": 8}


@pytest.fixture
def server(tmp_path) -> Iterator[Served]:
    """A running server with a budget of 8 MiB and no other tier."""
    with serve(tmp_path, MEMORY) as served:
        yield served


def read(client: MemoryClient, step: int, owner: int = 0, generation: int = 1, secret=SECRET, job=JOB) -> bytes:
    held = client.open(owner, f"g{generation}-s{step}", secret=secret, job=job)
    check_bytes(held.manifest, held.image)
    return bytes(held.image)


def forked(body) -> None:
    """Run `body` in a process that kills itself after it."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def links_of(pid: int) -> dict[Path, str]:
    """What a process has open; some of it may be closed meanwhile."""
    links = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links[descriptor] = str(descriptor.readlink())
    return links


# --- what is held ---------------------------------------------------------------------------------


def test_the_last_two_snapshots_are_held(server):
    writer = Writer(server)
    assert writer.mapping.slots == 2
    for step in (1, 2, 3):
        writer.save(step)
    assert server.held_steps() == [2, 3]
    assert read(writer.client, 3) == bytes([3]) * 1000
    assert read(server.client(), 2) == bytes([2]) * 1000


def test_steps_are_told_without_an_answer(server):
    writer = Writer(server)
    for _ in range(3):
        writer.client.stepped(0)
    writer.save(1)
    assert read(writer.client, 1) == bytes([1]) * 1000


def test_a_seal_beside_another_call_is_told_apart_from_it(tmp_path):
    """The thread that copies a state seals it, while training tells of steps and asks."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(2) as threads:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client = MemoryClient(str(tmp_path / "s"))
        server, _ = listener.accept()
        server.settimeout(10)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # nobody may read the answers before the end

        answers = {"seal": {"crc64nvme": "", "next_slot": None}, "wait_idle": {"idle": True}}

        def answer() -> Counter[str]:
            heard: Counter[str] = Counter()
            with server:
                while (request := wire.receive(server)) is not None:
                    heard[request["op"]] += 1
                    if request["op"] != "stepped":
                        wire.send(server, answers[request["op"]])
            return heard

        def seal() -> None:
            for number in range(100):  # some are longer than a socket takes at once
                record = {
                    "save_id": "g1-s1",
                    "world_size": 1,
                    "own_digest": "",
                    "plan": "",
                    "nbytes": 1,
                    "saved_at": 0.0,
                }
                values = ["v" * (1 << 20 if number % 25 == 0 else 1)]
                client.seal(0, 0, {**record, "values": values, "extras": {}})

        heard, sealed = threads.submit(answer), threads.submit(seal)
        try:
            for _ in range(100):
                client.stepped(0)
                assert client.ask(WaitIdle(timeout_s=1)).idle
            sealed.result()
            client.flush()
        finally:
            client.close()
        assert heard.result() == {"seal": 100, "stepped": 100, "wait_idle": 100}


def test_a_snapshot_comes_with_its_plan_and_its_values(server):
    writer = Writer(server)
    writer.save(1)
    held = server.client().open(0, "g1-s1", secret=SECRET, job=JOB)
    assert held.plan == writer.plan
    assert held.manifest["values"] == [1]


def test_what_is_held_is_told_with_what_a_choice_needs(server):
    Writer(server, owner=0).save(1)
    Writer(server, owner=1).save(1)
    first, second = server.ask("held")["snapshots"]
    assert (first["rank"], first["step"], first["save_id"], first["generation"]) == (0, 1, "g1-s1", 1)
    assert first["content"] == second["content"]  # the same bytes on both
    assert (first["state"], first["replica"], first["world_size"]) == ("sealed", False, 1)


def test_a_writer_killed_halfway_costs_nothing_that_was_whole(server):
    Writer(server).save(1)

    def die_halfway() -> None:
        writer = Writer(server)
        slot = writer.begin(2)
        assert slot is not None
        writer.fill(slot, 2, share=0.5)

    forked(die_halfway)
    assert server.held_steps() == [1]
    assert read(server.client(), 1) == bytes([1]) * 1000


def test_what_a_dead_writer_had_asked_to_seal_is_sealed(server):
    def die_after_asking() -> None:
        writer = Writer(server)
        slot = writer.begin(7)
        assert slot is not None
        writer.seal(slot, 7)

    forked(die_after_asking)
    assert server.held_steps() == [7]


def test_a_writer_that_has_another_number_is_not_waited_for_under_its_former_one(server):
    moved = server.client()
    moved.attach(7)
    moved.attach(3)
    held = server.client().ask(Held(owner=7, pid=0))  # asked when a new process is rank 7
    assert held.snapshots == ()


def test_a_flipped_bit_is_found_before_a_byte_is_used(server):
    writer = Writer(server)
    writer.save(1)
    writer.mapping.memory[500] ^= 1
    with pytest.raises(CorruptSnapshotError, match="rank 0 at step 1: CRC64-NVME"):
        read(server.client(), 1)


def test_a_snapshot_of_another_job_or_secret_is_refused(server):
    writer = Writer(server)
    writer.save(1)
    with pytest.raises(CorruptSnapshotError, match="not signed with this job's secret"):
        read(writer.client, 1, secret=b"x" * 32)
    with pytest.raises(CorruptSnapshotError, match="belongs to job 'j', not to 'other'"):
        read(writer.client, 1, job="other")


@pytest.mark.parametrize("asked", [{"save_id": "g1-s1"}, {"owner": 1}])
def test_a_snapshot_that_comes_in_place_of_another_is_refused(server, asked):
    """Whole and signed, so that nothing else would tell."""
    for rank in (0, 1):
        writer = Writer(server, rank)
        writer.save(1)
        writer.save(2)
    client = server.client()
    call = client._call
    client._call = lambda request: call(request.model_copy(update=asked))
    with pytest.raises(CorruptSnapshotError, match="the server sent another snapshot than g1-s2 of rank 0"):
        read(client, 2)


def test_what_is_not_held_is_an_error(server):
    with pytest.raises(NotFoundError, match="this node has no complete snapshot 'g1-s9' of rank 0"):
        read(server.client(), 9)
    assert server.held_steps() == []


# --- memory ---------------------------------------------------------------------------------------


def test_more_than_the_budget_is_refused_and_what_is_held_stays(server):
    writer = Writer(server)
    writer.save(1)
    words = r"rank 1 \(2 slots of 4\.0 MiB, own\) needs 8\.0 MiB in the memory tier; its budget is 8 MiB a node"
    with pytest.raises(MemoryTierFullError, match=words):
        writer.client.map(1, 4 << 20)
    assert read(writer.client, 1) == bytes([1]) * 1000


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_server_out_of_descriptors_says_so_and_goes_on_once_there_are_some(server, left):
    """A new region takes one for its memory and the answer another; a third waits for who connects next."""
    writer, other, owners = Writer(server), server.client(), itertools.count(8)
    writer.save(1)
    assert other.attach(7) is None  # its connection has its descriptor now
    opened = Path(f"/proc/{server.pid}/fd")
    until(lambda: sum("socket:" in link for link in links_of(server.pid).values()) == 3)  # no earlier client's

    def takes_the_next_connection() -> bool:
        """`accept` has its descriptor as soon as it waits, and it is not among those that are shown: the next region
        leaves a gap for it."""
        were = {int(fd.name) for fd in opened.iterdir()}
        other.map(next(owners), 1000)
        other.attach(7)  # the answer's own has gone since
        now = {int(fd.name) for fd in opened.iterdir()}
        return any(number not in now for number in range(min(now - were)))

    until(takes_the_next_connection)
    before, at_first = resource.prlimit(server.pid, resource.RLIMIT_NOFILE), {int(fd.name) for fd in opened.iterdir()}
    free = [number for number in range(max(at_first) + 4) if number not in at_first]
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (free[left], before[1]))
    with pytest.raises(HyperpodExtError, match="Too many open files"):
        other.map(1, 1000)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
    assert other.map(1, 1000).slots == 2  # on the same connection
    until(lambda: len(list(opened.iterdir())) == len(at_first) + 1)  # the answer's own goes once it was sent
    assert server.held_steps() == [1]


def test_a_layout_that_grows_costs_none_of_the_last_two_snapshots(server):
    """Another rank may not have finished the newest step: then everybody needs the one before."""
    Writer(server).save(1)
    large = Writer(server, nbytes=1 << 20)
    assert server.held_steps() == [1]
    large.save(2)
    assert server.held_steps() == [1, 2]
    assert read(large.client, 1) == bytes([1]) * 1000
    large.save(3)
    assert server.held_steps() == [2, 3]


def test_memory_that_a_smaller_layout_no_longer_needs_can_be_had_again(server):
    for nbytes in (1 << 20, 2 << 20):  # 2 and 4 of the 8 MiB
        writer = Writer(server, nbytes=nbytes)
        for step in (1, 2):
            writer.save(step)
    Writer(server, owner=1, nbytes=2 << 20)


def test_the_budget_counts_whole_pages_as_memory_does():
    pages = 4  # two slots for each of two owners
    budget = Budget(pages * mmap.PAGESIZE, lambda: 1 << 40)
    regions = Regions(kind="own", job=JOB, secret=SECRET, budget=budget, slots=2)
    for _ in range(3):
        for owner in (0, 1):
            os.close(regions.map(owner, 1)[1])
        with pytest.raises(MemoryTierFullError):
            regions.map(2, 1)
        for owner in (0, 1):
            regions.drop(owner)


def test_a_worker_that_truncates_its_memory_cannot_hurt_the_server(server):
    writer = Writer(server)
    memory = [one for one, link in links_of(server.pid).items() if "memfd:hpx-own" in link]
    with pytest.raises(PermissionError):
        os.truncate(memory[0], 0)
    assert writer.save(1)


# --- plans ----------------------------------------------------------------------------------------


def test_a_plan_that_is_not_what_its_digest_says_is_refused(server):
    with pytest.raises(CorruptSnapshotError, match="does not have the digest in its manifest"):
        server.ask("add_plan", digest="0" * 64, document=plan_of(10).to_json())


def test_a_snapshot_without_a_known_plan_never_exists(server):
    writer = Writer(server)
    slot = writer.begin(1)
    assert slot is not None
    writer.plan = plan_of(999)
    writer.seal(slot, 1)
    with pytest.raises(NotFoundError, match=r"plan .* is not known here"):
        writer.client.flush()
    assert server.held_steps() == []


# --- generations ----------------------------------------------------------------------------------


def test_a_writer_of_an_older_generation_is_refused(server):
    writer = Writer(server)
    server.ask("fence", generation=3)
    slot = writer.begin(5, generation=2)
    assert slot is not None
    writer.seal(slot, 5, generation=2)
    with pytest.raises(StaleGenerationError, match="rank 0 of generation 2 may not write step 5"):
        writer.client.flush()
    writer.client.flush()  # said once, for all that was asked


def test_a_save_after_a_refused_one_goes_to_the_right_slot(server):
    writer = Writer(server)
    writer.save(1)
    server.ask("fence", generation=2, step=1)
    writer.begin(2, generation=1)
    with pytest.raises(StaleGenerationError):
        writer.client.flush()
    for step in (2, 3):
        writer.save(step, generation=2)
        assert server.held_steps() == [step - 1, step]


def test_steps_that_a_generation_gave_up_are_forgotten_and_the_restored_one_is_newest_again(server):
    """Were step 3 still the newest whole one, the next save would overwrite step 2: all that anybody can restore."""
    writer = Writer(server)
    for step in (1, 2, 3):
        writer.save(step)
    server.ask("fence", generation=2, step=2)
    assert server.held_steps() == [2]
    writer.client.forget_slot()
    slot = writer.begin(3, generation=2)
    assert slot is not None
    writer.client.flush()
    assert server.held_steps() == [2]  # while it is being written, too
    writer.seal(slot, 3, generation=2)
    writer.client.flush()
    assert server.held_steps() == [2, 3]
    assert read(writer.client, 3, generation=2) != b""


def test_what_the_generation_itself_has_saved_is_not_given_up_by_hearing_of_it_again(server):
    writer = Writer(server)
    server.ask("fence", generation=2, step=0)
    for step in (1, 2):
        writer.save(step, generation=2)
    server.ask("fence", generation=2, step=0)
    assert server.held_steps() == [1, 2]


def test_what_was_being_written_when_its_step_was_given_up_never_exists(server):
    writer = Writer(server)
    writer.save(1)
    slot = writer.begin(2)
    assert slot is not None
    writer.client.flush()
    server.ask("fence", generation=2, step=1)
    writer.seal(slot, 2)
    with pytest.raises(HyperpodExtError, match="g1-s2"):
        writer.client.flush()
    assert server.held_steps() == [1]


def test_the_newest_snapshot_is_never_given_up(server):
    writer = Writer(server)
    writer.save(1)
    writer.client._next_slot = 0  # a client that has lost count
    writer.begin(2)
    with pytest.raises(NotFoundError, match="slot 0 of rank 0 must not be overwritten"):
        writer.client.flush()
    assert read(writer.client, 1) == bytes([1]) * 1000


# --- a process that was prepared ------------------------------------------------------------------


def test_a_process_that_was_started_before_anybody_knew_whose_it_is_becomes_a_memory_server(tmp_path: Path) -> None:
    prepared, unused = MemoryServer(os.environ), MemoryServer(os.environ)
    served = Served(tmp_path / "memory", prepared.pid)
    prepared.begin(served.path, served.path, 3, environ_of(tmp_path, MEMORY))
    until(lambda: answers(served.path))
    assert served.ask("held", owner=0, pid=os.getpid())["snapshots"] == []
    os.close(unused.orders)
    assert os.waitstatus_to_exitcode(os.waitpid(unused.pid, 0)[1]) == 0, "nobody had a use for it"
    os.close(unused.output)
    served.kill()
    os.waitpid(served.pid, 0)
