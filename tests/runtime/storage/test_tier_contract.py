"""The four tiers, one contract: what each of them promises of a snapshot, whoever wrote it and whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import peer_node
import pytest
import served
from durable_place import Bucket, Directory, Place
from peer_node import Node

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError, StaleGenerationError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.client.client import MappedSnapshot
from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient
from hyperpod_ext.runtime.snapshot.manifest import check_bytes, save_id_of

NBYTES = 1000
OTHER_SECRET = b"f" * 32


class Tier(Protocol):
    """One tier, as its writers and readers use it. Every byte of a snapshot is the number of its step."""

    def save(self, step: int, generation: int = 1) -> None: ...

    def die_halfway(self, step: int) -> None: ...

    def steps(self) -> list[int]: ...

    def read(self, step: int, secret: bytes = served.SECRET, job: str = served.JOB) -> bytes: ...

    def damage(self, step: int) -> None: ...

    def begin_generation(self, generation: int, step: int) -> None: ...


class TierContract:
    def test_what_was_saved_is_read_bit_for_bit(self, tier: Tier):
        tier.save(3)
        assert tier.read(3) == bytes([3]) * NBYTES

    def test_step_0_is_a_step_like_any_other(self, tier: Tier):
        tier.save(0)
        assert tier.steps() == [0]
        assert tier.read(0) == bytes(NBYTES)

    def test_the_newest_two_are_there(self, tier: Tier):
        for step in (1, 2, 3):
            tier.save(step)
        assert tier.steps()[-2:] == [2, 3]
        assert tier.read(2) == bytes([2]) * NBYTES

    def test_a_flipped_bit_is_never_handed_out(self, tier: Tier):
        tier.save(1)
        tier.save(2)
        tier.damage(2)
        with pytest.raises(CorruptSnapshotError):
            tier.read(2)
        assert tier.read(1) == bytes([1]) * NBYTES

    def test_a_save_that_dies_halfway_is_not_there_and_harms_nothing(self, tier: Tier):
        tier.save(1)
        tier.die_halfway(2)
        assert tier.steps() == [1]
        assert tier.read(1) == bytes([1]) * NBYTES
        tier.save(3)
        assert tier.steps()[-1] == 3

    def test_a_reader_with_another_secret_gets_nothing(self, tier: Tier):
        tier.save(1)
        with pytest.raises(HyperpodExtError):
            tier.read(1, secret=OTHER_SECRET)

    def test_a_reader_of_another_job_gets_nothing(self, tier: Tier):
        tier.save(1)
        with pytest.raises(CorruptSnapshotError, match="belongs to job"):
            tier.read(1, job="another")

    def test_a_writer_of_an_older_generation_is_refused_and_its_later_steps_are_forgotten(self, tier: Tier):
        tier.save(1)
        tier.save(2)
        tier.begin_generation(2, step=1)
        with pytest.raises(StaleGenerationError):
            tier.save(3, generation=1)
        assert 3 not in tier.steps()
        tier.save(2, generation=2)
        assert tier.steps()[-1] == 2


class _Served:
    """A memory server as a process, and one rank that saves to it."""

    def __init__(self, server: served.Served) -> None:
        self.server = server
        self.writer = served.Writer(server, nbytes=NBYTES)
        self.generation = 1

    def save(self, step: int, generation: int = 1) -> None:
        self.generation = max(self.generation, generation)
        self.writer.save(step, generation)

    def begin_generation(self, generation: int, step: int) -> None:
        self.server.ask("fence", generation=generation, step=step, run="run")
        self.writer.client.forget_slot()


class Memory(_Served):
    def die_halfway(self, step: int) -> None:
        slot = self.writer.begin(step)
        assert slot is not None
        self.writer.fill(slot, step, share=0.5)
        self.writer.client.flush()
        self.writer = served.Writer(self.server, nbytes=NBYTES)

    def steps(self) -> list[int]:
        return sorted({held["step"] for held in self.server.ask("held")["snapshots"]})

    def read(self, step: int, secret: bytes = served.SECRET, job: str = served.JOB) -> bytes:
        return _bytes_of(self.server.client().open(0, self._newest(step), secret=secret, job=job))

    def _newest(self, step: int) -> str:
        return max(held["save_id"] for held in self.server.ask("held")["snapshots"] if held["step"] == step)

    def damage(self, step: int) -> None:
        memory = self.writer.mapping.memory
        memory[bytes(memory).index(bytes([step]) * NBYTES) + NBYTES // 2] ^= 1


class Durable(_Served):
    def __init__(self, server: served.Served, place: Place) -> None:
        super().__init__(server)
        self.place = place
        self.begin_generation(1, step=0)

    def save(self, step: int, generation: int = 1) -> None:
        super().save(step, generation)
        assert self.server.ask("wait_idle", timeout_s=30.0)["idle"]

    def die_halfway(self, step: int) -> None:
        """Everything was uploaded but the manifest."""
        self.save(step)
        (name,) = (name for name in self.place.names() if name.endswith("manifest.json") and f"{step:09d}" in name)
        self.place.delete(name)

    def steps(self) -> list[int]:
        return sorted({found["step"] for found in self._found()})

    def _found(self) -> list[dict[str, Any]]:
        return list(self.server.ask("durable")["checkpoints"])

    def read(self, step: int, secret: bytes = served.SECRET, job: str = served.JOB) -> bytes:
        found = max((found for found in self._found() if found["step"] == step), key=lambda each: each["generation"])
        client = self.server.client()
        return _bytes_of(client.fetch(found["url"], found["folder"], 0, secret=secret, job=job))

    def damage(self, step: int) -> None:
        (name,) = (name for name in self.place.names() if name.endswith("__0_0.distcp") and f"{step:09d}" in name)
        data = bytearray(self.place.read(name))
        data[len(data) // 2] ^= 1
        self.place.write(name, bytes(data))


class Peer:
    def __init__(self) -> None:
        self.here, self.there = Node(0), Node(1)
        self.here.replicator.set_peers({1: self.there.address})

    def save(self, step: int, generation: int = 1) -> None:
        self.here.save(0, step, bytes([step]) * NBYTES, generation)
        assert self.here.replicator.wait_idle(20.0)

    def die_halfway(self, step: int) -> None:
        """The sender is gone after half of the bytes."""
        manifest = Node(2).save(0, step, bytes([step]) * NBYTES)
        with ps.connect(*self.there.address, peer_node.SECRET) as line:
            plan = peer_node.plan_of(NBYTES).to_json()
            wire.send(line, {"op": "replica_begin", "manifest": manifest, "plan": plan})
            token = (wire.receive(line) or {})["token"]
            wire.send(line, {"op": "chunk", "token": token, "start": 0, "nbytes": NBYTES})
            line.sendall(bytes(NBYTES // 2))

    def steps(self) -> list[int]:
        return peer_node.steps(self.there.replicas)

    def read(self, step: int, secret: bytes = served.SECRET, job: str = served.JOB) -> bytes:
        peer = PeerClient(*self.there.address, secret)
        try:
            _, replicas = peer.held()
            save_id = max(held["save_id"] for held in replicas if held["step"] == step)
            manifest, plan = peer.open(0, save_id, job=job)
            image = bytearray(plan.nbytes)
            peer.read_into(0, save_id, 0, memoryview(image))
        finally:
            peer.close()
        check_bytes(manifest, image)
        return bytes(image)

    def damage(self, step: int) -> None:
        with self.there.replicas.pin(0, save_id_of(1, step), "a cosmic ray") as pin, pin.data as data:
            data[NBYTES // 2] ^= 1

    def begin_generation(self, generation: int, step: int) -> None:
        for regions in (self.here.own, self.here.replicas, self.there.own, self.there.replicas):
            regions.fence(generation, step)

    def close(self) -> None:
        self.here.close()
        self.there.close()


def _bytes_of(held: MappedSnapshot) -> bytes:
    check_bytes(held.manifest, held.image)
    return bytes(held.image)


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Memory]:
        with served.serve(tmp_path, {"kind": "memory"}) as server:
            yield Memory(server)


class TestPeerTier(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Peer]:
        peer = Peer()
        yield peer
        peer.close()


class TestFileTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Durable]:
        place = Directory(tmp_path / "shared")
        with served.serve(tmp_path, {"kind": "memory"}, place.tier(every_steps=1)) as server:
            yield Durable(server, place)


@pytest.mark.slow
class TestS3Tier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Durable]:
        place = Bucket()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", place.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        with served.serve(tmp_path, {"kind": "memory"}, place.tier(every_steps=1)) as server:
            yield Durable(server, place)
