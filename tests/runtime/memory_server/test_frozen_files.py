"""Frozen parameters in durable checkpoints: uploaded once, and in each checkpoint's folder all the same.

A real memory server uploads to a directory and to S3. An image has 1.5 MiB of frozen bytes and then 1,000 others, each
of them the number of its step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from durable_place import Bucket, Directory, Place, folder_of
from fault_proxy import FaultProxy, Faults
from s3_server import CREDENTIALS
from served import JOB, SECRET, Served, Writer, serve
from waiting import until

from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier
from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.integrations.single_rank_checkpoint import SingleRankCheckpoint
from hyperpod_ext.runtime.memory_server.protocol.requests import SaveRecord
from hyperpod_ext.runtime.memory_server.state import NodeMemory
from hyperpod_ext.runtime.snapshot.layout_plan import Item, Plan
from hyperpod_ext.runtime.snapshot.manifest import check_bytes, crc64nvme, crc_text, save_id_of
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.file import FileStore
from hyperpod_ext.runtime.storage.inventory import take_inventory
from hyperpod_ext.runtime.storage.names import Found
from hyperpod_ext.runtime.storage.open import open_store
from hyperpod_ext.runtime.storage.verify import verify

BASE, TRAINED = 3 << 19, 1000
NBYTES = BASE + TRAINED
MEMORY = {"kind": "memory"}
ITEMS = (
    Item(0, "base", "uint8", (BASE,), (0,), (BASE,), 0, 0, BASE, BASE),
    Item(1, "trained", "uint8", (TRAINED,), (0,), (TRAINED,), BASE, BASE, TRAINED, NBYTES),
)
PLAN = Plan(["{", ("base", "trained"), "T", "T"], ITEMS, NBYTES)


def record_of(base: bytes, step: int, generation: int = 1, world_size: int = 1) -> dict[str, Any]:
    record = {"save_id": save_id_of(generation, step), "world_size": world_size, "own_digest": "", "saved_at": 0.0}
    extras = {"frozen": [len(base), crc_text(crc64nvme(base))]}
    return record | {"plan": PLAN.digest, "nbytes": NBYTES, "values": [], "extras": extras}


class Adapted(Writer):
    """A rank whose base is frozen."""

    def __init__(self, server: Served, owner: int = 0, world_size: int = 1) -> None:
        super().__init__(server, owner, NBYTES, world_size)
        self.client.add_plan(PLAN)
        self.base = bytes(range(256)) * (BASE // 256)

    def image(self, step: int) -> bytes:
        return self.base + bytes([step + 100 * self.owner]) * TRAINED

    def save(self, step: int, generation: int = 1, when_busy: str = "wait") -> bool:
        slot = self.begin(step, generation, when_busy)
        assert slot is not None
        start = slot * self.mapping.slot_bytes
        self.mapping.memory[start : start + NBYTES] = self.image(step)
        self.client.seal(self.owner, slot, record_of(self.base, step, generation, self.world_size))
        self.client.flush()
        return True


class Job:
    """One node with one rank, whose every step is uploaded."""

    def __init__(self, server: Served, place: Place) -> None:
        self.server, self.place, self.writer = server, place, Adapted(server)
        self.enter(1, 0)

    def enter(self, generation: int, step: int) -> None:
        self.server.ask("fence", generation=generation, step=step, run="run")
        self.writer.client.forget_slot()

    def save(self, *steps: int, generation: int = 1) -> int:
        """Save these steps one after another; return the number of bytes that the node sent for them."""
        before = self.status["bytes_sent"]
        for step in steps:
            self.writer.save(step, generation)
            assert self.server.ask("wait_idle", timeout_s=30.0)["idle"]
        assert self.status["failed"] == 0, self.status
        return int(self.status["bytes_sent"] - before)

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.server.ask("status")["copying"][-1])

    def steps(self) -> list[int]:
        return sorted(found["step"] for found in self.server.ask("durable")["checkpoints"])

    def read(self, step: int) -> bytes:
        """Return the image of a step as a restore reads it."""
        (found,) = (found for found in self.server.ask("durable")["checkpoints"] if found["step"] == step)
        held = self.server.client().fetch(found["url"], found["folder"], 0, secret=SECRET, job=JOB)
        check_bytes(held.manifest, held.image)
        return bytes(held.image)

    def frozen(self, step: int) -> str:
        return f"{folder_of(self.place, step)}/__0_2.distcp"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "file":
        return Directory(tmp_path / "shared")
    bucket = Bucket()
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": bucket.url}.items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.fixture
def job(place: Place, tmp_path: Path) -> Iterator[Job]:
    with serve(tmp_path / "node", MEMORY, place.tier(every_steps=1, keep=2)) as server:
        yield Job(server, place)


def test_only_the_first_checkpoint_uploads_the_frozen_part(job):
    assert job.save(1) == NBYTES
    assert job.save(2, 3, 4) == 3 * TRAINED
    assert job.steps() == [3, 4]
    for step in (3, 4):
        assert job.place.read(job.frozen(step)) == job.writer.base
        assert job.read(step) == job.writer.image(step)


def test_each_checkpoint_is_complete_when_all_others_are_deleted(job):
    job.save(1, 2, 3, 4, 5)
    assert job.steps() == [4, 5]
    older, newest = folder_of(job.place, 4), folder_of(job.place, 5)
    for name in job.place.names():
        assert name.startswith(("generations/", older, newest))
        if name.startswith(f"{older}/"):
            job.place.delete(name)
    assert job.read(5) == job.writer.image(5)


def test_a_frozen_tensor_that_changed_is_uploaded_again(job):
    job.save(1, 2)
    changed = bytearray(job.writer.base)
    changed[BASE // 2] ^= 1
    job.writer.base = bytes(changed)
    assert job.save(3) == NBYTES
    assert job.save(4) == TRAINED
    assert job.read(4) == job.writer.image(4)
    assert job.read(3)[:BASE] == changed


def test_a_previous_checkpoint_that_is_gone_is_not_needed(job):
    """As retention of another node may delete it between the comparison and the copy."""
    job.save(1, 2)
    for name in job.place.names():
        if name.startswith("step-"):
            job.place.delete(name)
    assert job.save(3) == NBYTES
    assert job.save(4) == TRAINED
    assert (job.read(3), job.read(4)) == (job.writer.image(3), job.writer.image(4))


def test_a_previous_file_that_was_cut_is_not_copied(job):
    job.save(1)
    job.place.delete(job.frozen(1))
    job.place.write(job.frozen(1), job.writer.base[:-1])
    assert job.save(2) == NBYTES
    assert job.read(2) == job.writer.image(2)


def test_a_previous_file_that_was_changed_is_never_restored_and_not_copied_after_a_fault(job):
    """S3 does not copy it. A directory does, since nobody reads it; the MAC of the first upload is then wrong."""
    job.save(1)
    changed = bytearray(job.writer.base)
    changed[5] ^= 1
    job.place.write(job.frozen(1), bytes(changed))
    sent = job.save(2)
    if isinstance(job.place, Bucket):
        assert sent == NBYTES
        assert job.read(2) == job.writer.image(2)
    else:
        assert sent == TRAINED
        with pytest.raises(CorruptSnapshotError, match=r"__0_2.distcp: CRC64-NVME is"):
            job.read(2)
    job.enter(2, 2)
    assert job.save(3, generation=2) == NBYTES
    assert job.save(4, generation=2) == TRAINED
    assert (job.read(3), job.read(4)) == (job.writer.image(3), job.writer.image(4))


def test_a_frozen_part_of_few_bytes_stays_in_the_image(job, monkeypatch):
    job.writer.base = job.writer.base[: (1 << 20) - 1] + bytes(BASE - (1 << 20) + 1)
    real = record_of

    def short(base: bytes, *more: Any) -> dict[str, Any]:
        return real(base[: (1 << 20) - 1], *more)

    monkeypatch.setitem(globals(), "record_of", short)
    assert job.save(1, 2) == 2 * NBYTES
    assert not [name for name in job.place.names() if name.endswith("_2.distcp")]
    assert job.read(2) == job.writer.image(2)


def test_ranks_with_one_base_and_their_own_adapters_share_a_file(tmp_path):
    place = Directory(tmp_path / "shared")
    with serve(tmp_path / "node", MEMORY, place.tier(every_steps=1, keep=1), workers=2) as server:
        job, second = Job(server, place), Adapted(server, owner=1, world_size=2)
        job.writer.world_size = 2
        second.save(1)
        assert job.save(1) == BASE + 2 * TRAINED
        second.save(2)
        assert job.save(2) == 2 * TRAINED
        files = [place.root / folder_of(place, 2) / f"__{rank}_2.distcp" for rank in (0, 1)]
        assert files[0].samefile(files[1])
        found = server.ask("durable")["checkpoints"][0]
        held = server.client().fetch(found["url"], found["folder"], 1, secret=SECRET, job=JOB)
        assert bytes(held.image) == second.image(2)


def test_a_checkpoint_with_a_frozen_file_is_verified(tmp_path):
    place = Directory(tmp_path / "shared")
    with serve(tmp_path / "node", MEMORY, place.tier(every_steps=1, keep=1)) as server:
        job = Job(server, place)
        job.save(1, 2)
    store = open_store(str(place.root))
    (seen,) = take_inventory(store, job=JOB, secret=SECRET).seen
    assert (seen.state, seen.files["__0_2.distcp"], seen.files["__0_0.distcp"]) == ("complete", BASE, TRAINED)
    assert verify(store, seen, SECRET) == []
    frozen = place.root / job.frozen(2)
    for harm, found in (
        (job.writer.base[:-1] + b"\0", "CRC64-NVME is"),
        (job.writer.base[:-1], f"has {BASE - 1} bytes, but the manifest lists {BASE}"),
        (None, "is missing"),
    ):
        frozen.write_bytes(harm) if harm is not None else frozen.unlink()
        (seen,) = take_inventory(store, job=JOB, secret=SECRET).seen
        (defect,) = verify(store, seen, SECRET)
        assert defect.file == "__0_2.distcp"
        assert defect.message.startswith(found)


def test_a_checkpoint_of_one_rank_is_loaded_from_both_files(tmp_path):
    place = Directory(tmp_path / "shared")
    with serve(tmp_path / "node", MEMORY, place.tier(every_steps=1, keep=1)) as server:
        job = Job(server, place)
        job.save(1, 2)
    checkpoint = SingleRankCheckpoint(str(place.root), job=JOB, secret=SECRET)
    loaded = checkpoint.load()
    assert bytes(loaded["base"].tolist()) == job.writer.base
    assert loaded["trained"].unique().tolist() == [2]
    frozen = place.root / job.frozen(2)
    frozen.write_bytes(job.writer.base[:-1] + b"\0")
    with pytest.raises(CorruptSnapshotError, match=r"__0_2.distcp: CRC64-NVME is"):
        checkpoint.load()


# --- kills ----------------------------------------------------------------------------------------


class DyingStore(FileStore):
    """A directory whose writer is killed in its call number `last` for one step."""

    def __init__(self, path: str, last: int) -> None:
        super().__init__(path)
        self.left = last

    def _called(self, name: str) -> None:
        if name.startswith("step-000000002"):
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def put(self, name: str, *arguments: Any, **options: Any) -> None:
        self._called(name)
        super().put(name, *arguments, **options)
        self._called(name)

    def put_new(self, name: str, data: bytes, **options: Any) -> bool:
        self._called(name)
        return super().put_new(name, data, **options)

    def copy(self, source: str, name: str, *arguments: Any, **options: Any) -> bool:
        self._called(name)
        copied = super().copy(source, name, *arguments, **options)
        self._called(name)
        return copied


def node_memory(folder: Path, last: int = 1 << 30) -> NodeMemory:
    tiers = (MemoryTier(every_steps=1), FileTier(path=str(folder), every_steps=1, keep=1))
    policy = CheckpointPolicy(tiers=tiers, when_busy="wait")
    memory = NodeMemory(policy, job=JOB, secret=SECRET, node=0, nodes=1, owners=1, usable_bytes=lambda: 1 << 30)
    (uploader,) = memory.uploaders
    uploader.checkpoints.store = DyingStore(uploader.url.removeprefix("file://"), last)
    memory.plans.add(PLAN.to_json(), PLAN.digest)
    return memory


def save(memory: NodeMemory, *steps: int, base: bytes = bytes(BASE)) -> None:
    for step in steps:
        region, descriptor = memory.map(0, NBYTES)
        os.close(descriptor)
        slot = memory.own.next_slot(0, "wait", 20)
        assert slot is not None
        memory.begin(0, slot, step, save_id_of(1, step), 1)
        region.view(slot, NBYTES)[:] = base + bytes([step]) * TRAINED
        memory.seal(0, slot, SaveRecord.model_validate(record_of(base, step)))
        assert memory.wait_idle(30)


def test_a_node_that_is_killed_at_any_moment_leaves_no_half_checkpoint(tmp_path):
    """The next one writes the same step again; every moment of an upload is met, until one is not killed."""
    killed = 0
    for moment in range(20):
        folder = tmp_path / str(moment)
        if (pid := os.fork()) == 0:
            save(node_memory(folder, moment), 1, 2)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        checkpoints = Checkpoints(open_store(str(folder / JOB)), job=JOB, secret=SECRET)
        if not status:
            assert [one.step for one in checkpoints.found()] == [2]
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        killed += 1
        assert [one.step for one in checkpoints.found()] == [1]
        assert_whole(checkpoints, 1)
        memory = node_memory(folder)
        save(memory, 2)
        assert memory.uploaders[0].status["failed"] == 0, memory.uploaders[0].status
        assert [one.step for one in checkpoints.found()] == [2], "step 1 was deleted"
        assert_whole(checkpoints, 2)
        assert not [path for path in folder.rglob("*.partial") if folder_of(Directory(folder), 2) in str(path)]
    assert killed >= 8


def assert_whole(checkpoints: Checkpoints, step: int) -> None:
    manifest = checkpoints.read(Found(step, 1))
    image = bytearray(NBYTES)
    checkpoints.read_image(Found(step, 1).folder, manifest, "0", memoryview(image))
    assert image == bytes(BASE) + bytes([step]) * TRAINED


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    bucket = Bucket()
    with FaultProxy(bucket.url) as between:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": between.url}.items():
            monkeypatch.setenv(name, value)
        yield between


# requests of one upload whose answers never come
HELD: dict[str, str] = {
    "before the copy": r"^POST .*000000002.*__0_2.distcp\?uploads",
    "during the copy": r"^PUT .*000000002.*__0_2.distcp.*partNumber",
    "at its end": r"^POST .*000000002.*__0_2.distcp.*uploadId",
    "after the copy": r"^PUT .*000000002.*__0_0.distcp",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", HELD)
def test_a_node_that_is_killed_during_a_copy_within_s3_leaves_no_half_checkpoint(tmp_path, proxy, moment):
    bucket = Bucket()
    tier = bucket.tier(every_steps=1, keep=1)
    with serve(tmp_path / "first", MEMORY, tier) as server:
        job = Job(server, bucket)
        job.save(1)
        proxy.order(Faults(only=HELD[moment], cut_answer_after=0))
        job.writer.save(2)
        until(lambda: any(seen.struck for seen in proxy.seen))
    proxy.order(Faults())
    with serve(tmp_path / "second", MEMORY, tier) as server:
        assert [found["step"] for found in server.ask("durable")["checkpoints"]] == [1]
        job = Job(server, bucket)
        assert job.read(1) == job.writer.image(1)
        job.save(2)
        assert job.steps() == [2]
        assert job.read(2) == job.writer.image(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        Faults(only="^PUT .*__0_2.*partNumber", status=503, times=2),
        Faults(only="^(PUT|POST) .*__0_2", cut_answer_after=0, times=2),
        Faults(only="^PUT .*__0_2.*partNumber", status=501, code="NotImplemented"),
    ],
    ids=["throttled", "answers lost", "not implemented"],
)
def test_s3_in_bad_weather_copies_or_gets_the_bytes(tmp_path, proxy, faults):
    bucket = Bucket()
    with serve(tmp_path / "node", MEMORY, bucket.tier(every_steps=1, keep=1)) as server:
        job = Job(server, bucket)
        job.save(1)
        proxy.order(faults)
        sent = job.save(2)
        assert any(seen.struck for seen in proxy.seen)
        assert sent == (NBYTES if faults.status == 501 else TRAINED)
        assert job.read(2) == job.writer.image(2)


@pytest.mark.slow
def test_a_copy_within_s3_sends_no_bytes_over_the_network(tmp_path, proxy):
    bucket = Bucket()
    with serve(tmp_path / "node", MEMORY, bucket.tier(every_steps=1, keep=1)) as server:
        job = Job(server, bucket)
        job.save(1)
        proxy.order(Faults())
        job.save(2)
        sent = {seen.line.partition("?")[0].rpartition("/")[2]: seen.nbytes for seen in proxy.seen if "_" in seen.line}
        copies = [seen for seen in proxy.seen if "__0_2.distcp" in seen.line and seen.line.startswith("PUT")]
        assert [seen.nbytes for seen in copies] == [0]
        assert sent["__0_0.distcp"] == TRAINED
        assert sum(seen.nbytes for seen in proxy.seen) < BASE // 10
