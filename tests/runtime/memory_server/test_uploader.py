"""Snapshots on their way to a durable tier: a real memory server, and a directory as the tier.

Where a copy has to be held up, the job has a second node, which brings its part when the test says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from served import JOB, SECRET, Served, Writer, plan_of, serve
from waiting import until

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier
from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError, NotFoundError, UnreachableError
from hyperpod_ext.runtime.agent.copies import CopyMonitor
from hyperpod_ext.runtime.memory_server.protocol.requests import NextSlot, SaveRecord, ServerStatus, Status
from hyperpod_ext.runtime.memory_server.restore_cache import RestoreCache
from hyperpod_ext.runtime.memory_server.state import NodeMemory
from hyperpod_ext.runtime.memory_server.uploader import Uploader
from hyperpod_ext.runtime.snapshot.manifest import check_bytes, save_id_of, sign
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.names import Found, folder_of, image_of
from hyperpod_ext.runtime.storage.open import open_store

MEMORY = {"kind": "memory"}
PLAN = plan_of(1000)


def tier(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"kind": "file", "path": str(tmp_path / "tier"), "every_steps": 10, **more}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Served]:
    """The memory server of a job of one node, which keeps every tenth step."""
    with serve(tmp_path / "node", MEMORY, tier(tmp_path)) as served:
        yield served


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """What has arrived."""
    return Checkpoints(open_store(str(tmp_path / "tier" / JOB)), job=JOB, secret=SECRET)


def idle(server: Served) -> bool:
    return bool(server.ask("wait_idle", timeout_s=20)["idle"])


def copying(server: Served) -> dict[str, Any]:
    return dict(server.ask("status")["copying"][-1])


def steps(checkpoints: Checkpoints) -> list[int]:
    return [one.step for one in checkpoints.found()]


def image(checkpoints: Checkpoints, step: int, nbytes: int = 1000, generation: int = 1) -> bytes:
    into = bytearray(nbytes)
    checkpoints.store.read_into(f"{folder_of(step, generation)}/{image_of(0)}", memoryview(into))
    return bytes(into)


# --- what is brought ------------------------------------------------------------------------------


def test_there_is_one_slot_more_for_what_is_being_copied(alone):
    assert Writer(alone).mapping.slots == 3


def test_the_steps_that_are_due_arrive_whole_and_the_others_do_not(alone, checkpoints):
    writer = Writer(alone)
    for step in range(1, 22):
        writer.save(step)
        if step % 10 == 0:
            assert idle(alone)
    assert steps(checkpoints) == [20, 10]
    assert image(checkpoints, 20) == bytes([20]) * 1000
    assert checkpoints.read(Found(20, 1))["ranks"]["0"]["values"] == [20]
    status = copying(alone)
    assert (status["done"], status["durable_step"], status["bytes_sent"], status["failed"]) == (2, 20, 2000, 0)


def test_a_snapshot_that_has_arrived_is_known_to_be_durable(alone):
    Writer(alone).save(10)
    assert idle(alone)
    (held,) = alone.ask("held")["snapshots"]
    assert held["state"] == "durable"


def test_what_a_killed_writer_had_asked_to_seal_arrives(alone, checkpoints):
    pid = os.fork()
    if pid == 0:
        writer = Writer(alone)
        slot = writer.begin(10)
        assert slot is not None
        writer.fill(slot, 10)
        writer.seal(slot, 10)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert alone.held_steps() == [10]
    assert idle(alone)
    assert steps(checkpoints) == [10]


def test_a_checkpoint_is_due_once_all_ranks_of_the_node_have_sealed_it(tmp_path, checkpoints):
    with serve(tmp_path / "node", MEMORY, tier(tmp_path), workers=2) as server:
        first, second = Writer(server, owner=0), Writer(server, owner=1)
        first.save(10)
        assert idle(server)
        assert steps(checkpoints) == []
        second.save(10)
        assert idle(server)
        assert steps(checkpoints) == [10]
        manifest = checkpoints.read(Found(10, 1))
    assert manifest["files"] == {"0": image_of(0), "1": image_of(0)}  # equal on both, so it is there once


def test_a_step_that_one_rank_never_sealed_gives_way_to_the_next(tmp_path, checkpoints):
    with serve(tmp_path / "node", MEMORY, tier(tmp_path), workers=2) as server:
        first, second = Writer(server, owner=0), Writer(server, owner=1)
        first.save(10)
        for writer in (first, second):
            writer.save(20)
        assert idle(server)
        assert steps(checkpoints) == [20]
        for step in range(21, 26):  # the pin of step 10 is gone: nothing waits
            first.save(step)


def test_old_checkpoints_make_way(tmp_path, checkpoints):
    with serve(tmp_path / "node", MEMORY, tier(tmp_path, keep=2, keep_every_steps=30)) as server:
        writer = Writer(server)
        for step in range(10, 70, 10):
            writer.save(step)
            assert idle(server)
    assert steps(checkpoints) == [60, 50, 30]


def test_older_checkpoints_that_cannot_be_deleted_make_no_failure_of_the_new_one(tmp_path, checkpoints, monkeypatch):
    """The note of a failure lay in a checkpoint that was whole."""
    refusals = iter(["no such permission"])

    def refuse(*_: object) -> None:
        if why := next(refusals, ""):
            raise HyperpodExtError(why)

    monkeypatch.setattr(Checkpoints, "prune", refuse)
    policy = CheckpointPolicy(tiers=(MemoryTier(), FileTier.model_validate(tier(tmp_path))))
    memory = NodeMemory(policy, job=JOB, secret=SECRET, node=0, nodes=1, owners=1, usable_bytes=lambda: 1 << 30)
    memory.plans.add(PLAN.to_json(), PLAN.digest)
    os.close(memory.map(0, 1000)[1])
    for step, told in ((10, "were not deleted: no such permission"), (20, "were not deleted")):
        slot = memory.own.next_slot(0)
        assert slot is not None
        memory.begin(0, slot, step, save_id_of(1, step), 1)
        record = {"save_id": save_id_of(1, step), "world_size": 1, "own_digest": "", "extras": {}, "saved_at": 0.0}
        memory.seal(0, slot, SaveRecord.model_validate({**record, "plan": PLAN.digest, "nbytes": 1000, "values": []}))
        assert memory.wait_idle(20)
        status = memory.uploaders[0].status
        assert (status["failed"], told in status["last_error"]) == (0, True)
    assert steps(checkpoints) == [20, 10]
    assert not list((tmp_path / "tier").rglob("failed-*"))


def test_a_step_that_was_asked_for_is_brought_too(alone, checkpoints):
    alone.ask("schedule_copy", kind="file", step=7)
    alone.ask("schedule_copy", kind="s3", step=8)  # another tier's business
    writer = Writer(alone)
    for step in (6, 7, 8):
        writer.save(step)
        assert idle(alone)
    assert steps(checkpoints) == [7]


def test_two_tiers_are_served_side_by_side(tmp_path, checkpoints):
    other = {"kind": "s3", "uri": "s3://nowhere-to-be-found/prefix", "every_steps": 10}
    with serve(tmp_path / "node", MEMORY, tier(tmp_path), other) as server:
        Writer(server).save(10)
        until(lambda: steps(checkpoints) == [10])


# --- the end of a job -----------------------------------------------------------------------------


def test_the_newest_step_can_be_brought_though_it_is_not_due(alone, checkpoints):
    writer = Writer(alone)
    for step in (6, 7):
        writer.save(step)
    assert alone.ask("upload_now", save_id="g1-s7", timeout_s=20)["idle"]
    assert steps(checkpoints) == [7]


def test_what_has_arrived_already_is_not_brought_again(alone, checkpoints):
    Writer(alone).save(10)
    assert idle(alone)
    assert alone.ask("upload_now", save_id="g1-s10", timeout_s=20)["idle"]
    assert steps(checkpoints) == [10]
    assert copying(alone)["bytes_sent"] == 1000


def test_a_commit_that_is_not_here_costs_no_wait(alone, checkpoints):
    Writer(alone).save(7)
    assert alone.ask("upload_now", save_id="g1-s6", timeout_s=20)["idle"]
    assert steps(checkpoints) == []


def test_what_lacks_ranks_that_have_left_is_not_committed(alone, checkpoints):
    """The job was of two nodes when it was saved, and the other one has left."""
    Writer(alone, world_size=2).save(7)
    assert alone.ask("upload_now", save_id="g1-s7", timeout_s=20)["idle"]
    assert copying(alone)["last_error"] == "step 7: only 1 of 2 ranks have announced parts of step 7"
    assert steps(checkpoints) == []


# --- a copy that takes its time -------------------------------------------------------------------


class OtherNode:
    """Node 1 of two, with one rank that holds bit for bit what rank 0 does; so node 0 uploads for both."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def bring(self, step: int, generation: int = 1) -> None:
        """Do this node's part of a checkpoint whose first part node 0 has announced."""
        folder = folder_of(step, generation)
        until(lambda: 0 in self._checkpoints.progress(folder).announced)
        (manifest,) = self._checkpoints.record(folder, 0)
        self._checkpoints.put_record(folder, 1, [sign({**manifest, "rank": 1}, SECRET)])
        self._checkpoints.put_done(folder, 1, {})

    def announced(self, step: int, generation: int = 1) -> bool:
        """Whether node 0 has begun with a checkpoint."""
        return 0 in self._checkpoints.progress(folder_of(step, generation)).announced


@pytest.fixture
def other(checkpoints: Checkpoints) -> OtherNode:
    return OtherNode(checkpoints)


@pytest.fixture
def serve_two(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts the server of node 0 of two; its copies last until the other node has done its part."""
    running: list[Any] = []

    def start(every_steps: int = 10, **policy: Any) -> Served:
        running.append(serve(tmp_path / "node", MEMORY, tier(tmp_path, every_steps=every_steps), nodes=2, **policy))
        return running[-1].__enter__()

    yield start
    for one in running:
        one.__exit__(None, None, None)


def test_a_checkpoint_exists_when_every_node_has_brought_its_part(serve_two, other, checkpoints):
    server = serve_two()
    Writer(server).save(10)
    until(lambda: other.announced(10))
    assert not server.ask("wait_idle", timeout_s=0.1)["idle"]
    assert steps(checkpoints) == []
    other.bring(10)
    assert idle(server)
    assert steps(checkpoints) == [10]
    assert sorted(checkpoints.read(Found(10, 1))["ranks"]) == ["0", "1"]
    names = [entry.name for entry in checkpoints.store.list(folder_of(10, 1))]
    assert not any("node-" in name or "done-" in name for name in names)


def test_what_is_being_copied_is_never_overwritten(serve_two, other, checkpoints):
    server = serve_two()
    writer = Writer(server)
    for step in range(10, 19):
        assert writer.save(step)
    assert server.held_steps() == [10, 17, 18]
    other.bring(10)
    assert idle(server)
    assert image(checkpoints, 10) == bytes([10]) * 1000
    for step in (19, 20):
        writer.save(step)
    assert 10 not in server.held_steps()


def full(server: Served, other: OtherNode) -> Writer:
    """A rank with a copy of step 1 under way, one of step 2 waiting, and step 3 the newest: no slot is free."""
    writer = Writer(server)
    assert writer.save(1)
    until(lambda: other.announced(1))
    for step in (2, 3):
        assert writer.save(step)
    return writer


def test_wait_waits_for_a_copy_to_end(serve_two, other, checkpoints):
    server = serve_two(every_steps=1, when_busy="wait")
    writer = full(server, other)
    saved = threading.Event()
    threading.Thread(target=lambda: (writer.save(4), saved.set()), daemon=True).start()
    assert not saved.wait(0.3)
    other.bring(1)
    assert saved.wait(20)
    for step in (2, 3, 4):
        other.bring(step)
    assert idle(server)
    assert steps(checkpoints) == [4, 3, 2]  # none was given up; three are kept


def test_a_rank_that_died_while_it_waited_for_a_slot_holds_nobody_up(serve_two, other):
    server = serve_two(every_steps=1, when_busy="wait")
    pid = os.fork()
    if pid == 0:
        try:
            full(server, other).client._send(NextSlot(owner=0, when_busy="wait"))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert server.ask("wait_others", pids=[], timeout_s=20)["others"] == []
    assert server.held_steps() == [1, 2, 3]


def test_nor_does_one_whose_socket_another_process_has_inherited(serve_two, other):
    """The kernel does not say that it has ended: its agent does."""
    server = serve_two(every_steps=1, when_busy="wait")
    full(server, other).client._send(NextSlot(owner=0, when_busy="wait"))
    server.ask("ended", pid=os.getpid())
    assert server.ask("wait_others", pids=[], timeout_s=20)["others"] == []
    assert server.held_steps() == [1, 2, 3]


def test_a_part_that_does_not_come_is_waited_for_by_nobody(serve_two, other, checkpoints):
    """Else a rank that waits for a copy to end would stand for as long as this node waits for the other."""
    server = serve_two(every_steps=1, when_busy="wait")
    writer = full(server, other)
    checkpoints.put_failed(folder_of(1, 1), 1)
    assert writer.save(4)
    assert "step 1: node 1 could not upload its part of step 1" in copying(server)["last_error"]
    for step in (2, 3, 4):
        other.bring(step)
    assert idle(server)
    assert steps(checkpoints) == [4, 3, 2]


def test_a_node_that_fails_tells_the_others_and_may_try_again(tmp_path, serve_two, other, checkpoints):
    server = serve_two()
    in_the_way = tmp_path / "tier" / JOB / folder_of(10, 1) / image_of(0)
    in_the_way.mkdir(parents=True)
    Writer(server).save(10)
    other.bring(10)
    until(lambda: checkpoints.progress(folder_of(10, 1)).failed == {0})
    assert idle(server)  # who tells the others is not free for another try yet
    in_the_way.rmdir()
    assert server.ask("upload_now", save_id="g1-s10", timeout_s=20)["idle"]
    assert steps(checkpoints) == [10]
    assert not checkpoints.progress(folder_of(10, 1)).failed


def test_supersede_never_waits_and_brings_the_newest_when_it_can(serve_two, other, checkpoints):
    server = serve_two(every_steps=1, when_busy="supersede")
    writer = full(server, other)
    for step in range(4, 30):
        assert writer.save(step, when_busy="supersede")
    assert 29 in server.held_steps()
    other.bring(29)
    assert idle(server)
    assert steps(checkpoints) == [29]
    assert copying(server)["superseded"] == 28


@pytest.mark.parametrize("when_busy", ["supersede", "skip"])
def test_a_step_that_another_node_left_out_gives_way_to_one_that_both_have(tmp_path, checkpoints, when_busy):
    """Otherwise each waits for the other with a step of its own, again and again."""
    options: dict[str, Any] = {"nodes": 2, "when_busy": when_busy}
    first = serve(tmp_path / "first", MEMORY, tier(tmp_path), node=0, **options)
    second = serve(tmp_path / "second", MEMORY, tier(tmp_path), node=1, **options)
    with first as a, second as b:
        one, two = Writer(a, owner=0), Writer(b, owner=1)
        two.save(10, when_busy=when_busy)
        until(lambda: 1 in checkpoints.progress(folder_of(10, 1)).announced)
        one.save(20, when_busy=when_busy)
        until(lambda: 0 in checkpoints.progress(folder_of(20, 1)).announced)
        two.save(20, when_busy=when_busy)
        until(lambda: steps(checkpoints) == [20])


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """An S3 that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def unanswered(silent: socket.socket) -> dict[str, str]:
    """Environment with that S3."""
    url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    return {"AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_S3": url, **keys}


S3 = {"kind": "s3", "uri": "s3://bucket/prefix", "every_steps": 10}


def test_a_place_that_does_not_answer_never_stops_training(tmp_path, silent, unanswered):
    with serve(tmp_path, MEMORY, S3, when_busy="supersede", env=unanswered) as server:
        writer = Writer(server)
        assert writer.save(10, when_busy="supersede")
        until(lambda: select.select([silent], [], [], 0)[0], "step 10 is not on its way")
        for step in range(11, 60):
            assert writer.save(step, when_busy="supersede")
        assert copying(server)["failed"] == 0  # no save has waited until it was given up
        assert 10 in server.held_steps()  # still on its way: given up for newer ones, none would ever arrive
        assert 59 in server.held_steps()
        assert copying(server)["superseded"] == 3


def test_skip_leaves_out_what_is_due_while_another_is_on_its_way(tmp_path, unanswered):
    with serve(tmp_path, MEMORY, S3, when_busy="skip", workers=2, env=unanswered) as server:
        one, two = Writer(server, owner=0), Writer(server, owner=1)
        for step in range(10, 45):
            assert one.save(step, when_busy="skip")
            assert two.save(step, when_busy="skip")
        assert copying(server)["skipped"] == 3
        assert server.held_steps() == [10, 43, 44]


def test_the_end_of_the_job_is_due_even_where_others_would_be_skipped(tmp_path, unanswered):
    with serve(tmp_path, MEMORY, S3, when_busy="skip", env=unanswered) as server:
        writer = Writer(server)
        for step in (10, 11):
            writer.save(step)
        assert not server.ask("upload_now", save_id="g1-s11", timeout_s=0.1)["idle"]
        for step in range(12, 20):
            writer.save(step, when_busy="skip")
        assert server.held_steps()[:2] == [10, 11]  # neither is overwritten


def test_a_server_killed_halfway_leaves_no_checkpoint(serve_two, other, checkpoints):
    server = serve_two()
    Writer(server).save(10)
    until(lambda: other.announced(10))
    server.kill()
    assert list(checkpoints.store.folders()) == [folder_of(10, 1)]
    assert steps(checkpoints) == []


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_tier_that_refuses_costs_nothing_but_its_checkpoint(tmp_path, alone, checkpoints):
    tmp_path.joinpath("tier").write_text("in the way")
    writer = Writer(alone)
    writer.save(10)
    assert idle(alone)
    status = copying(alone)
    assert (status["failed"], status["done"]) == (1, 0)
    assert "step 10: Cannot write" in status["last_error"]
    assert alone.held_steps() == [10]
    tmp_path.joinpath("tier").unlink()
    writer.save(20)
    assert idle(alone)
    assert steps(checkpoints) == [20]


SIGNED_BUT_EMPTY = json.dumps({"manifests": [sign({"format": 1, "job": JOB}, SECRET)]})


@pytest.mark.parametrize("text", ["", "{}", '{"manifests": [7]}', '{"manifests": [{"rank": 1}]}', SIGNED_BUT_EMPTY])
def test_what_another_node_wrote_by_mistake_ends_that_copy_alone(serve_two, other, checkpoints, tmp_path, text):
    server = serve_two()
    writer = Writer(server)
    (folder := tmp_path / "tier" / JOB / folder_of(10, 1)).mkdir(parents=True)
    (folder / "node-1.json").write_text(text)
    writer.save(10)
    assert idle(server)
    assert copying(server)["failed"] == 1
    writer.save(20)
    other.bring(20)
    assert idle(server)
    assert steps(checkpoints) == [20]


def test_memory_that_changed_after_it_was_sealed_never_becomes_a_checkpoint(serve_two, other, checkpoints):
    server = serve_two()
    writer = Writer(server)
    writer.save(10)
    until(lambda: other.announced(10))
    writer.mapping.memory[500] ^= 1
    other.bring(10)
    assert idle(server)
    assert steps(checkpoints) == []
    assert "CRC64-NVME" in copying(server)["last_error"]


async def _told(statuses: list[dict[str, Any]], **how: bool) -> list[dict[str, Any]]:
    """Events that an agent makes of what its memory server says."""
    told: list[dict[str, Any]] = []

    async def ask(_: Status) -> ServerStatus:
        return ServerStatus(snapshots=(), copying=(statuses.pop(0),))

    def event(kind: str, **fields: Any) -> None:
        told.append({"kind": kind, **fields})

    def broken(why: str, *, code: str = "") -> None:
        told.append({"kind": "broken", "why": why, "code": code})

    watch = CopyMonitor(ask, event, broken)
    while statuses:
        await watch.tell(**how)
    return told


def test_each_change_of_how_copying_goes_is_an_event_and_a_failure_is_said(alone, capsys):
    before = copying(alone)
    Writer(alone).save(10)
    assert idle(alone)
    after = copying(alone)
    failed = after | {"failed": 1, "last_error": "step 20: no space left"}
    told = asyncio.run(_told([before, after, after, failed, failed | {"taken_over": True, "failed": 2}]))
    assert [(one.get("newest_step"), one.get("failed")) for one in told[:3]] == [(10, 0), (10, 1), (10, 2)]
    assert (told[3]["kind"], told[3]["code"]) == ("broken", "StaleGenerationError")
    assert "step 20: no space left" in capsys.readouterr().err


def test_that_copies_go_over_tcp_and_not_by_nixl_is_said_once_with_the_reason(capsys):
    counts = {"tier": "peer", "failed": 0, "skipped": 0, "superseded": 0, "last_error": None}
    peers = [
        {**counts, "replicated_step": step, "fell_back": why} for step, why in ((3, ""), (4, "no RDMA"), (5, "no RDMA"))
    ]
    told = asyncio.run(_told(peers))
    assert [one["fell_back"] for one in told] == ["", "no RDMA", "no RDMA"]
    assert capsys.readouterr().err == "copies go over TCP, not by NIXL: no RDMA\n"


def test_what_has_come_to_a_durable_tier_is_told_at_once_and_the_rest_now_and_then():
    """A job may be killed the moment after, and its log is to have the step that it can go on from."""
    counts = {"failed": 0, "skipped": 0, "superseded": 0, "last_error": None}
    durable = [{"tier": "/fsx", "durable_step": step, **counts} for step in (None, 10, 10)]
    durable[2] |= {"skipped": 7}
    peers = [{"tier": "peer", "replicated_step": step, **counts} for step in (3, 4)]
    told = asyncio.run(_told([*durable, *peers], all_changes=False))
    assert [(one["tier"], one["newest_step"]) for one in told] == [("/fsx", 10)]
    every = asyncio.run(_told([*durable, *peers], all_changes=True))
    assert [(one["tier"], one["newest_step"], one["skipped"]) for one in every] == [
        ("/fsx", 10, 0),
        ("/fsx", 10, 7),
        ("peer", 3, 0),
        ("peer", 4, 0),
    ]


def test_two_tiers_that_hang_cost_one_wait_and_not_two(tmp_path):
    waits: list[float] = []

    def slow() -> Uploader:
        def wait_idle(timeout_s: float) -> bool:
            waits.append(timeout_s)
            time.sleep(0.01)
            return True

        return cast("Uploader", SimpleNamespace(wait_idle=wait_idle))

    policy = CheckpointPolicy(tiers=(MemoryTier(),))
    memory = NodeMemory(policy, job=JOB, secret=SECRET, node=0, nodes=1, owners=1, usable_bytes=lambda: 1 << 30)
    memory.uploaders = [slow(), slow()]
    assert memory.wait_idle(1.0)
    assert waits[1] <= waits[0] - 0.01  # what the first one took is no longer there to wait for


# --- generations ----------------------------------------------------------------------------------


def test_a_generation_is_claimed_with_the_step_it_began_at(alone, checkpoints):
    alone.ask("fence", generation=4, step=5, run="this run")
    Writer(alone).save(10, generation=4)
    assert idle(alone)
    assert checkpoints.fence_of(4) == {"generation": 4, "step": 5, "run": "this run"}
    assert checkpoints.newest_generation() == 4


def test_a_run_that_another_has_followed_writes_nothing(alone, checkpoints):
    checkpoints.fence(5, 0, "a later run")
    alone.ask("fence", generation=4, step=0, run="this run")
    Writer(alone).save(10, generation=4)
    assert idle(alone)
    assert steps(checkpoints) == []
    assert (
        "another run of the job has begun generation 5, so generation 4 no longer writes"
        in copying(alone)["last_error"]
    )


def test_a_generation_that_was_followed_while_its_copy_waited_is_claimed_too(serve_two, other, checkpoints):
    server = serve_two(when_busy="wait")
    writer = Writer(server)
    server.ask("fence", generation=1, step=0, run="r")
    writer.save(10)
    until(lambda: other.announced(10))
    server.ask("fence", generation=2, step=15, run="r")
    writer.save(20, generation=2)
    server.ask("fence", generation=3, step=25, run="r")
    other.bring(10)
    other.bring(20, generation=2)
    assert idle(server)
    assert checkpoints.fence_of(2) == {"generation": 2, "step": 15, "run": "r"}
    assert not copying(server)["taken_over"]


def test_a_run_that_another_follows_during_a_copy_does_not_commit_it(serve_two, other, checkpoints):
    server = serve_two()
    server.ask("fence", generation=1, step=0, run="this run")
    Writer(server).save(10)
    until(lambda: other.announced(10))
    checkpoints.fence(2, 0, "a later run")
    other.bring(10)
    assert idle(server)
    assert steps(checkpoints) == []
    assert copying(server)["taken_over"]
    assert (
        "another run of the job has begun generation 2, so generation 1 no longer writes"
        in copying(server)["last_error"]
    )


def test_what_the_job_began_from_is_not_written_once_more(alone, checkpoints):
    url = copying(alone)["tier"]
    alone.ask("fence", generation=2, step=10, run="r", stored=[url])
    writer = Writer(alone)
    writer.save(10, generation=2)
    ended = alone.ask("upload_now", save_id="g2-s10", timeout_s=20)  # nor at the end of a job that had nothing to do
    assert [(one["arrived"], one["newest_step"], one["left_ranks"]) for one in ended["tiers"]] == [(True, 10, [])]
    assert steps(checkpoints) == []
    assert copying(alone)["durable_step"] == 10
    writer.save(20, generation=2)
    assert idle(alone)
    assert steps(checkpoints) == [20]


def test_a_copy_of_a_step_that_was_given_up_ends(serve_two, other, checkpoints):
    server = serve_two()
    server.ask("fence", generation=1, step=0, run="r")
    writer = Writer(server)
    writer.save(10)
    until(lambda: other.announced(10))  # before the next is due, which would take its place in the line
    writer.save(20)
    server.ask("fence", generation=2, step=5, run="r")
    assert idle(server)
    writer.save(10, generation=2)
    other.bring(10, generation=2)
    assert idle(server)
    assert checkpoints.found() == [Found(10, 2)]


def test_a_generation_that_is_not_certain_of_its_step_gives_up_nothing(serve_two, other, checkpoints):
    """Its first choice may fail for a moment, and so may its next: what is newer is wanted then."""
    server = serve_two()
    server.ask("fence", generation=1, step=0, run="r")
    writer = Writer(server)
    for step in (10, 11):
        writer.save(step)
    server.ask("fence", generation=2)
    assert server.held_steps() == [10, 11]
    other.bring(10)
    assert idle(server)
    assert steps(checkpoints) == [10]
    server.ask("fence", generation=2, step=10, run="r")
    assert server.held_steps() == [10]


# --- and back -------------------------------------------------------------------------------------


@pytest.fixture
def left(tmp_path: Path) -> None:
    """Steps 10 and 20 of an earlier run."""
    with serve(tmp_path / "before", MEMORY, tier(tmp_path)) as server:
        server.ask("fence", generation=1, step=0, run="before")
        writer = Writer(server)
        for step in (10, 20):
            writer.save(step)
            assert idle(server)


@pytest.mark.usefixtures("left")
def test_what_an_earlier_run_left_is_offered_newest_first(alone, tmp_path):
    answer = alone.ask("durable")
    assert answer["problems"] == []
    assert answer["generation"] == 1
    assert [(offer["step"], offer["folder"]) for offer in answer["checkpoints"]] == [
        (20, folder_of(20, 1)),
        (10, folder_of(10, 1)),
    ]
    offer = answer["checkpoints"][0]
    assert (offer["tier"], offer["url"], offer["save_id"]) == ("file", f"{tmp_path / 'tier'}/{JOB}", "g1-s20")
    assert offer["world_size"] == 1


@pytest.mark.usefixtures("left")
def test_what_cannot_be_read_is_told_beside_what_can(alone, tmp_path):
    (tmp_path / "tier" / JOB / folder_of(20, 1) / "manifest.json").write_text("")
    answer = alone.ask("durable")
    assert [offer["step"] for offer in answer["checkpoints"]] == [10]
    assert "manifest.json: not JSON" in answer["problems"][0]


def test_a_place_that_is_not_there_yet_is_no_problem(alone):
    assert alone.ask("durable") == {"checkpoints": [], "generation": 0, "problems": [], "unreachable": []}


def test_a_place_that_cannot_be_read_is_a_problem(alone, tmp_path):
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / JOB).symlink_to(tmp_path / "tier" / JOB)  # a loop
    answer = alone.ask("durable")
    assert answer["checkpoints"] == []
    assert len(answer["problems"]) == 1
    assert answer["unreachable"] == answer["problems"]


@pytest.mark.usefixtures("left")
def test_a_newest_manifest_that_cannot_be_read_now_is_not_passed_over(checkpoints, tmp_path, monkeypatch):
    """What is damaged stays so; what cannot be read may be the checkpoint to go on from."""
    place = FileTier(path=str(tmp_path / "tier"))
    uploader = SimpleNamespace(checkpoints=checkpoints, url=checkpoints.store.url, tier=place)
    cache = RestoreCache([cast(Any, uploader)], cast(Any, None), cast(Any, None))
    get = checkpoints.store.get

    def refused(name: str, *limit: int) -> bytes:
        if name == f"{folder_of(20, 1)}/manifest.json":
            raise UnreachableError("not now")
        return get(name, *limit)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.store, "get", refused)
        assert cache.offers().unreachable
    manifest = tmp_path / "tier" / JOB / folder_of(20, 1) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    answer = cache.offers()
    assert ([offer["step"] for offer in answer.checkpoints], answer.unreachable) == ([10], ())
    assert len(answer.problems) == 1


@pytest.mark.usefixtures("left")
def test_any_number_of_names_that_others_made_up_is_reported_in_a_few_lines(alone, tmp_path):
    for step in range(100, 200):
        made_up = tmp_path / "tier" / JOB / folder_of(step, 1) / "manifest.json"
        made_up.parent.mkdir()
        made_up.write_text("{}")
    answer = alone.ask("durable")
    assert [offer["step"] for offer in answer["checkpoints"]] == [20, 10]
    assert (len(answer["problems"]), answer["problems"][-1]) == (21, "80 more")


def fetch(server: Served, tmp_path: Path, step: int, rank: int = 0) -> bytes:
    client = server.client()
    held = client.fetch(f"{tmp_path / 'tier'}/{JOB}", folder_of(step, 1), rank, secret=SECRET, job=JOB)
    check_bytes(held.manifest, held.image)
    return bytes(held.image)


@pytest.mark.usefixtures("left")
def test_a_checkpoint_comes_back_into_memory(alone, tmp_path):
    assert fetch(alone, tmp_path, 20) == bytes([20]) * 1000
    assert fetch(alone, tmp_path, 10) == bytes([10]) * 1000
    assert alone.held_steps() == []  # nothing of it counts as saved here


@pytest.mark.usefixtures("left")
def test_manifest_and_layout_are_read_without_the_image(alone, tmp_path):
    """Of another number of ranks, each looks at all images, and reads those that it needs."""
    url = f"{tmp_path / 'tier'}/{JOB}"
    (tmp_path / "tier" / JOB / folder_of(20, 1) / image_of(0)).unlink()
    manifest, plan, bound = alone.client().fetch_head(url, folder_of(20, 1), 0, secret=SECRET, job=JOB)
    assert (manifest["step"], plan.nbytes, bound) == (20, 1000, True)
    with pytest.raises(NotFoundError):
        fetch(alone, tmp_path, 20)
    with pytest.raises(NotFoundError, match="is no tier of this job"):
        alone.client().fetch_head("/elsewhere", folder_of(20, 1), 0, secret=SECRET, job=JOB)


@pytest.mark.usefixtures("left")
def test_what_is_read_stays_readable_when_training_goes_on(alone, tmp_path):
    held = alone.client().fetch(f"{tmp_path / 'tier'}/{JOB}", folder_of(20, 1), 0, secret=SECRET, job=JOB)
    Writer(alone).save(21)
    assert bytes(held.image) == bytes([20]) * 1000


@pytest.mark.usefixtures("left")
def test_a_damaged_image_is_found_before_a_byte_is_used(alone, tmp_path):
    file = tmp_path / "tier" / JOB / folder_of(20, 1) / image_of(0)
    data = bytearray(file.read_bytes())
    data[500] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptSnapshotError, match=r"step-000000020-g000001/__0_0\.distcp: CRC64-NVME"):
        fetch(alone, tmp_path, 20)


@pytest.mark.usefixtures("left")
def test_an_image_cut_short_or_missing_is_an_error(alone, tmp_path):
    file = tmp_path / "tier" / JOB / folder_of(20, 1) / image_of(0)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptSnapshotError, match="ends at byte 999"):
        fetch(alone, tmp_path, 20)
    file.unlink()
    with pytest.raises(NotFoundError):
        fetch(alone, tmp_path, 20)
    assert fetch(alone, tmp_path, 10) == bytes([10]) * 1000


@pytest.mark.usefixtures("left")
def test_a_tier_or_a_rank_that_is_none_of_the_jobs_is_an_error(alone, tmp_path):
    with pytest.raises(NotFoundError, match="/elsewhere is no tier of this job"):
        alone.client().fetch("/elsewhere", folder_of(20, 1), 0, secret=SECRET, job=JOB)
    with pytest.raises(HyperpodExtError):
        fetch(alone, tmp_path, 20, rank=1)


@pytest.mark.usefixtures("left")
def test_memory_for_what_is_fetched_counts_and_is_given_back(tmp_path):
    """1000 bytes three times over a budget of 1 MiB are nothing; what is not given back would be seen."""
    with serve(tmp_path / "node", {"kind": "memory", "budget_mib": 1}, tier(tmp_path)) as server:
        writer = Writer(server, nbytes=300_000)  # three slots of it
        with pytest.raises(HyperpodExtError, match="in the memory tier"):
            Writer(server, owner=1, nbytes=100_000)
        for step in (21, 22, 23, 24):
            assert fetch(server, tmp_path, 20) == bytes([20]) * 1000
            writer.save(step)
        Writer(server, owner=1, nbytes=10_000)
