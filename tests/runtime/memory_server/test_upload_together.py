"""Two nodes upload the same steps at different speeds: neither may wait for a part that the other has given up."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import JOB, SECRET, plan_of
from waiting import until

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier
from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.errors import UnreachableError
from hyperpod_ext.runtime.memory_server.protocol.requests import Enter, SaveRecord
from hyperpod_ext.runtime.memory_server.state import NodeMemory
from hyperpod_ext.runtime.snapshot.manifest import save_id_of
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.file import FileStore
from hyperpod_ext.runtime.storage.names import folder_of

NBYTES = 1000


class GatedStore(FileStore):
    """A directory that takes its time over one name."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.held, self.reached, self.open = "", threading.Event(), threading.Event()

    def hold(self, name: str) -> None:
        """Let nothing through to the file of this name until `open` is set."""
        self.held = name

    def _pass(self, name: str) -> None:
        if self.held and name.endswith(self.held):
            self.reached.set()
            assert self.open.wait(20)

    def put(self, name: str, data: memoryview, crc64nvme: str, **more: Any) -> None:
        self._pass(name)
        super().put(name, data, crc64nvme, **more)

    def put_new(self, name: str, data: bytes, **options: Any) -> bool:
        self._pass(name)
        return super().put_new(name, data, **options)


class Node:
    """One of two nodes, with one rank, whose state is its own; every tenth step is due. Its number: the rank's."""

    def __init__(self, rank: int, folder: Path, number: int | None = None) -> None:
        tiers = (MemoryTier(every_steps=1), FileTier(path=str(folder / "tier"), every_steps=10))
        policy = CheckpointPolicy(tiers=tiers, when_busy="supersede")
        self.rank = rank
        self.memory = NodeMemory(
            policy,
            job=JOB,
            secret=SECRET,
            node=rank if number is None else number,
            nodes=2,
            owners=1,
            usable_bytes=lambda: 1 << 30,
        )
        (self.uploader,) = self.memory.uploaders
        self.store = self.uploader.checkpoints.store = GatedStore(self.uploader.url)
        self.plan = plan_of(NBYTES)
        self.memory.plans.add(self.plan.to_json(), self.plan.digest)

    def enter(self, generation: int, base: int, number: int) -> None:
        """A run under torchrun, in which this node is `number`, begins a generation after `base`."""
        run = f"run {generation}"
        order = Enter(generation=generation, base=base, drop=base, run=run, node=number, nodes=2, owners=1)
        self.memory.enter(order)

    def save(self, *steps: int, generation: int = 1) -> None:
        for step in steps:
            region, fd = self.memory.map(self.rank, NBYTES)
            os.close(fd)
            slot = self.memory.own.next_slot(self.rank, "supersede", 20)
            assert slot is not None
            self.memory.begin(self.rank, slot, step, save_id_of(generation, step), generation)
            region.view(slot, NBYTES)[:] = bytes([step + 30 * self.rank]) * NBYTES
            record = {"save_id": save_id_of(generation, step), "world_size": 2, "own_digest": "", "extras": {}}
            record |= {"plan": self.plan.digest, "nbytes": NBYTES, "values": [step], "saved_at": 0.0}
            self.memory.seal(self.rank, slot, SaveRecord.model_validate(record))

    def announced(self, step: int) -> bool:
        return self.rank in self.uploader.checkpoints.progress(folder_of(step, 1)).announced

    def steps(self) -> list[int]:
        return [one.step for one in self.uploader.checkpoints.found()]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    both = Node(0, tmp_path), Node(1, tmp_path)
    yield both
    for node in both:
        node.store.open.set()


def come_to_rest(*nodes: Node) -> None:
    for node in nodes:
        assert node.memory.wait_idle(100), f"node {node.rank} waits for a part that does not come"
        assert node.uploader.status["failed"] == 0, node.uploader.status["last_error"]


def give_up(node: Node, step: int) -> None:
    """While its uploader is busy with another, the rank's next saves need the slot of `step`."""
    node.save(step, step + 1, step + 2)


def begin_step_10(slow: Node, quick: Node) -> None:
    """One has brought its part of it; the other's image waits for its store to be opened."""
    slow.store.hold(f"{folder_of(10, 1)}/__{slow.rank}_0.distcp")
    slow.save(10)
    quick.save(10)
    assert slow.store.reached.wait(20)
    until(lambda: quick.rank in quick.uploader.checkpoints.progress(folder_of(10, 1)).done)


def give_up_step_20(slow: Node, quick: Node) -> None:
    """The slow one does, and both come to rest."""
    give_up(slow, 20)
    quick.save(20)
    until(lambda: quick.announced(20))
    slow.store.open.set()
    come_to_rest(slow, quick)


def test_a_step_given_up_beside_a_slow_upload_is_waited_for_by_nobody(nodes):
    slow, quick = nodes
    begin_step_10(slow, quick)
    give_up_step_20(slow, quick)
    assert slow.steps() == [10]
    assert [node.uploader.status["superseded"] for node in nodes] == [1, 2]


def test_a_step_that_the_first_node_has_passed_is_committed_by_the_other(nodes):
    """All its parts are there: else a tier that is slow on one node would never have a whole one."""
    quick, slow = nodes
    begin_step_10(slow, quick)
    give_up_step_20(slow, quick)
    assert slow.steps() == [10]


def test_another_nodes_part_is_waited_for_as_long_as_it_may_take(nodes, monkeypatch):
    monkeypatch.setattr("hyperpod_ext.runtime.memory_server.upload._DEADLINE_S", 0.3)
    monkeypatch.setattr("hyperpod_ext.runtime.memory_server.upload._SLOWEST_BYTES_S", NBYTES / 100)
    slow, quick = nodes
    begin_step_10(slow, quick)
    assert not quick.memory.wait_idle(1.0), "it waits on"
    slow.store.open.set()
    come_to_rest(slow, quick)
    assert slow.steps() == [10]


def test_the_memory_of_ranks_that_are_elsewhere_is_given_back_once_nobody_copies_from_it(nodes):
    node, _ = nodes
    node.store.hold(f"{folder_of(10, 1)}/node-0.json")
    node.save(10)
    assert node.store.reached.wait(20)
    node.memory.release_departed((5,), 6)
    assert node.memory.own.owners() == [0], "it is uploaded still"
    node.rank = 5
    node.store.open.set()
    node.memory.uploaders[0]._upload._queue.current.dropped = True  # the other node's part does not come
    assert node.memory.wait_idle(20)
    node.save(11)
    assert node.memory.own.owners() == [5]


def test_two_nodes_that_gave_up_each_what_the_other_has_meet_at_the_next_step(nodes):
    """One went on to step 20 without waiting for the other's part of step 10; the other, about to bring that, needed
    the memory of step 20."""
    late, early = nodes
    late.store.hold(f"{folder_of(10, 1)}/node-0.json")
    late.save(10)
    assert late.store.reached.wait(20)
    early.save(10)
    until(lambda: early.announced(10))
    give_up(late, 20)
    early.save(20)
    until(lambda: early.announced(20))
    late.store.open.set()
    come_to_rest(late, early)
    assert late.steps() == []
    for node in nodes:
        node.save(30)
    come_to_rest(late, early)
    assert late.steps() == [30]


def test_a_step_that_was_left_can_be_brought_after_all(nodes):
    """When the job ends, what is newest is brought, whatever was said of it before."""
    one, other = nodes
    one.uploader.checkpoints.put_left(folder_of(10, 1), 1)
    other.uploader._upload._reported.add(save_id_of(1, 10))  # as if this node had said so
    other.save(10)
    until(lambda: other.announced(10))
    one.save(10)
    come_to_rest(one, other)
    assert one.steps() == [10]


def test_a_newer_step_ends_the_wait_for_another_node_at_once(nodes, monkeypatch):
    """Not when it next looks at the store: by then the memory of the newer step may be needed too."""
    monkeypatch.setattr("hyperpod_ext.runtime.memory_server.upload._POLL_S", (60.0, 60.0))
    node, _ = nodes
    for step in (10, 20, 30):
        node.save(step)
        until(lambda step=step: node.announced(step))


def test_what_a_run_under_torchrun_has_loaded_from_memory_is_still_brought(nodes):
    """It does not save that step once more: its first save is of a later one."""
    for node in nodes:
        node.enter(1, 0, node.rank)
    begin_step_10(*nodes)
    for node in nodes:
        node.enter(2, 10, node.rank)
        node.save(13, generation=2)
        node.memory.fence(2, 10, "run 2", again=False)  # as its first save is whole
    nodes[0].store.open.set()
    come_to_rest(*nodes)
    assert nodes[0].steps() == [10]


def test_a_node_that_gets_another_number_brings_what_it_has_begun_under_the_former(nodes):
    """As torchrun may number them after a restart: the note of node 0 is there already, and its name taken."""
    slow, quick = reversed(nodes)
    for node in nodes:
        node.enter(1, 0, node.rank)
    begin_step_10(slow, quick)
    for node in nodes:
        node.enter(2, 11, 1 - node.rank)
    slow.store.open.set()
    come_to_rest(slow, quick)
    assert slow.steps() == [10]


def test_all_nodes_may_try_again_whoever_begins_first(nodes, monkeypatch):
    """One could not bring its part; so the other said that of its own. Both are asked once more: neither may take the
    note that the other has yet to take back for a part that will not come."""
    early, late = nodes
    with monkeypatch.context() as full:

        def refuse(*_: Any, **__: Any) -> None:
            raise UnreachableError("no space left")

        full.setattr(late.store, "put", refuse)
        for node in nodes:
            node.save(10)
        for node in nodes:
            assert node.memory.wait_idle(20)
    notes = early.uploader.checkpoints.progress(folder_of(10, 1))
    assert notes.failed == {0, 1}
    looks, look = [], early.store.list
    monkeypatch.setattr(early.store, "list", lambda *a, **k: (looks.append(1), look(*a, **k))[1])
    early.memory.upload_now(save_id_of(1, 10), 0)
    until(lambda: len(looks) > 2 or early.uploader.status["failed"] > 1)
    told = [node.memory.upload_now(save_id_of(1, 10), 20).tiers[0] for node in (late, early)]
    assert [(one["arrived"], one["error"]) for one in told] == [(True, "")] * 2
    assert early.steps() == [10]


def test_a_node_whose_second_try_fails_says_so_to_the_others(nodes, monkeypatch):
    other = nodes[1]

    def refuse(*_: Any, **__: Any) -> None:
        raise UnreachableError("no space left")

    monkeypatch.setattr(other.store, "put", refuse)
    for node in nodes:
        node.save(10)
    for node in nodes:
        assert node.memory.wait_idle(20)
    for node in nodes:
        node.memory.upload_now(save_id_of(1, 10), 0)
    for node in nodes:
        assert node.memory.wait_idle(20), "it waits for a part that does not come"
    assert [node.uploader.status["failed"] for node in nodes] == [2, 2]


def test_a_run_that_another_follows_as_it_commits_deletes_nothing(nodes, monkeypatch):
    """What is old to the one may be what the other has gone back to."""
    commit, pruned = Checkpoints.commit, []

    def commit_and_be_followed(self: Checkpoints, *rest: Any, **more: Any) -> bool:
        done = commit(self, *rest, **more)
        self.fence(2, 5, "another run")
        return done

    monkeypatch.setattr(Checkpoints, "commit", commit_and_be_followed)
    monkeypatch.setattr(Checkpoints, "prune", lambda *_: pruned.append(1))
    for node in nodes:
        node.enter(1, 0, node.rank)
        node.save(10)
    come_to_rest(*nodes)
    assert pruned == []
    assert nodes[0].steps() == [10]
    assert any(
        "another run of the job has begun generation" in (node.uploader.status["last_error"] or "") for node in nodes
    )


def test_a_spare_in_the_place_of_a_lost_node_has_a_number_beyond_the_nodes_of_the_job(tmp_path):
    """Numbers are not counts: of two nodes the second one was lost, and node 2 brings its part. Names that strangers
    write take part in nothing."""
    first, spare = Node(0, tmp_path), Node(1, tmp_path, number=2)
    made_up = tmp_path / "tier" / JOB / folder_of(10, 1)
    made_up.mkdir(parents=True)
    for name in ("node-7.json", "done-7.json", "failed-8.json", "left-9.json"):
        (made_up / name).write_text("{}")
    first.save(10)
    spare.save(10)
    come_to_rest(first, spare)
    assert first.steps() == [10]
