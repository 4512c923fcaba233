"""The memory server as a process of its own: what it holds outlives whoever wrote it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpod_ext.config.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import CorruptSnapshotError, MemoryTierFullError, NotFoundError, StaleGenerationError
from hyperpod_ext.runtime import wire
from hyperpod_ext.runtime.memory_server.client import MemoryClient

SECRET = b"0123456789abcdef0123456789abcdef"
RECORD = {"generation": 1, "skeleton": {"v": 1}, "items": [], "extras": {}, "own_digest": ""}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Path of the socket of a running server with a budget of 8 MiB."""
    (secret := tmp_path / "secret").touch(mode=0o600)
    secret.write_bytes(SECRET)
    policy = {"tiers": [{"kind": "memory", "budget_mib": 8}]}
    config = RuntimeConfig.model_validate_json(
        f'{{"name": "j", "nodes": 1, "workers_per_node": 1, "checkpoint": {str(policy).replace(chr(39), chr(34))}}}'
    )
    environ = {**os.environ, ENV_RUNTIME: config.model_dump_json(), "HPX_SECRET_FILE": str(secret)}
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "hyperpod_ext.runtime.memory_server", "--socket", str(path)]
    process = subprocess.Popen(command, env=environ)
    while not path.exists() or not _answers(path):
        assert process.poll() is None
    yield str(path)
    process.send_signal(signal.SIGTERM)
    process.wait()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def save(client: MemoryClient, step: int, data: bytes, owner: int = 0) -> None:
    mapping = client.map(owner, len(data))
    slot = client.begin(owner, step, f"g1-s{step}", 1)
    mapping.memory[slot * mapping.slot_bytes : slot * mapping.slot_bytes + len(data)] = data
    client.seal(owner, slot, {**RECORD, "save_id": f"g1-s{step}", "nbytes": len(data)})
    client.flush()


def read(client: MemoryClient, step: int, owner: int = 0, secret: bytes = SECRET, job: str = "j") -> bytes:
    return bytes(client.read(owner, f"g1-s{step}", secret=secret, job=job)[1])


def held_steps(path: str, owner: int = 0) -> list[int]:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(path)
        wire.send(asking, {"op": "held", "owner": owner, "pid": os.getpid()})
        answer = wire.receive(asking)
    assert answer is not None
    return sorted(snapshot["step"] for snapshot in answer["snapshots"])


def test_the_last_two_snapshots_are_held(server):
    client = MemoryClient(server)
    for step in (1, 2, 3):
        save(client, step, bytes([step]) * 1000)
    assert held_steps(server) == [2, 3]
    assert read(client, 3) == bytes([3]) * 1000
    assert read(client, 2) == bytes([2]) * 1000


def test_a_writer_killed_halfway_costs_nothing_that_was_whole(server):
    save(MemoryClient(server), 1, b"a" * 5000)
    pid = os.fork()
    if pid == 0:
        client = MemoryClient(server)
        mapping = client.map(0, 5000)
        slot = client.begin(0, 2, "g1-s2", 1)
        mapping.memory[slot * mapping.slot_bytes : slot * mapping.slot_bytes + 2500] = b"b" * 2500
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert held_steps(server) == [1]
    assert read(MemoryClient(server), 1) == b"a" * 5000


def test_what_a_dead_writer_had_asked_to_seal_is_sealed(server):
    pid = os.fork()
    if pid == 0:
        client = MemoryClient(server)
        client.map(0, 5000)
        slot = client.begin(0, 7, "g1-s7", 1)
        client.seal(0, slot, {**RECORD, "save_id": "g1-s7", "nbytes": 5000})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert held_steps(server) == [7]


def test_a_flipped_bit_is_found_before_a_byte_is_used(server):
    client = MemoryClient(server)
    save(client, 1, b"a" * 5000)
    mapping = client.map(0, 5000)
    mapping.memory[2500] ^= 1
    with pytest.raises(CorruptSnapshotError, match="rank 0 at step 1: CRC64-NVME"):
        read(client, 1)


def test_a_snapshot_of_another_job_or_secret_is_refused(server):
    client = MemoryClient(server)
    save(client, 1, b"a")
    with pytest.raises(CorruptSnapshotError, match="not signed with this job's secret"):
        read(client, 1, secret=b"x" * 32)
    with pytest.raises(CorruptSnapshotError, match="belongs to job 'j', not to 'other'"):
        read(client, 1, job="other")


def test_more_than_the_budget_is_refused_and_what_is_held_stays(server):
    client = MemoryClient(server)
    save(client, 1, b"a" * 1000)
    with pytest.raises(MemoryTierFullError, match=r"rank 1 needs 8\.0 MiB .* budget is 8 MiB a node"):
        client.map(1, 4 << 20)
    assert read(client, 1) == b"a" * 1000


def test_a_layout_that_grows_costs_none_of_the_last_two_snapshots(server):
    """Another rank may not have finished the newest step: then everybody needs the one before."""
    client = MemoryClient(server)
    save(client, 1, b"a" * 1000)
    client.map(0, 1 << 20)
    assert held_steps(server) == [1]
    save(client, 2, b"b" * (1 << 20))
    assert held_steps(server) == [1, 2]
    assert read(client, 1) == b"a" * 1000
    save(client, 3, b"c" * (1 << 20))
    assert held_steps(server) == [2, 3]


def test_a_writer_of_an_older_generation_is_refused(server):
    client = MemoryClient(server)
    client.map(0, 100)
    client._call({"op": "fence", "generation": 3})
    slot = client.begin(0, 5, "g2-s5", 2)
    client.seal(0, slot, {**RECORD, "save_id": "g2-s5", "nbytes": 100})
    with pytest.raises(StaleGenerationError, match="rank 0 of generation 2 may not write step 5"):
        client.flush()
    client.flush()  # said once, for all that was asked


def test_a_save_after_a_refused_one_goes_to_the_right_slot(server):
    client = MemoryClient(server)
    save(client, 1, b"a" * 1000)
    client._call({"op": "fence", "generation": 2})
    client.begin(0, 2, "g1-s2", 1)
    with pytest.raises(StaleGenerationError):
        client.flush()
    for step in (2, 3):
        slot = client.begin(0, step, f"g2-s{step}", 2)
        client.seal(0, slot, {**RECORD, "save_id": f"g2-s{step}", "nbytes": 1000})
        client.flush()
        assert held_steps(server) == [step - 1, step]


def test_the_newest_snapshot_is_never_given_up(server):
    client = MemoryClient(server)
    save(client, 1, b"a" * 1000)
    client._next_slot = 0  # a client that has lost count
    client.begin(0, 2, "g1-s2", 1)
    with pytest.raises(NotFoundError, match="slot 0 of rank 0 is not free"):
        client.flush()
    assert read(client, 1) == b"a" * 1000


def test_what_is_not_held_and_what_is_not_understood_are_errors(server):
    client = MemoryClient(server)
    with pytest.raises(NotFoundError, match="no sealed snapshot 'g1-s9' of rank 0"):
        read(client, 9)
    with pytest.raises(Exception, match="unknown op 'dance'"):
        client._call({"op": "dance"})
    assert held_steps(server) == []
