"""Frozen parameters in durable checkpoints of a job: uploaded once, restored as they were, loaded by plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command import hp_ext
from durable_place import flip, folder_of, harmed
from served import JOB, SECRET
from small_job import MEMORY, SmallJob, relaunched, trained

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.snapshot.manifest import FORMAT, sign
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.inventory import take_inventory
from hyperpod_ext.runtime.storage.names import Found
from hyperpod_ext.runtime.storage.open import open_store
from hyperpod_ext.runtime.storage.verify import verify

pytestmark = pytest.mark.slow

BASE = 4_000_000
"""Bytes of the frozen parameter, over both ranks."""

both = pytest.mark.parametrize("place", ["file", "s3"], indirect=True)


def sent(job: SmallJob) -> int:
    """Bytes that all nodes have uploaded."""
    return sum(server.ask("status")["copying"][-1]["bytes_sent"] for server in job.servers.values())


@both
def test_a_job_uploads_its_frozen_parameters_once_and_resumes_with_them(make_job, place):
    job = trained(make_job(MEMORY, place.tier(keep=2), kind="adapted"), 2)
    first = sent(job)
    assert first > BASE
    job.train(8)
    assert sent(job) - first < BASE // 10
    for rank in (0, 1):
        assert len(place.read(f"{folder_of(place, 8)}/__{rank}_2.distcp")) > BASE // 2
        assert len(place.read(f"{folder_of(place, 8)}/__{rank}_0.distcp")) < BASE // 10
    job = relaunched(make_job, job)
    assert job.resume() == 8
    job.assert_holds(8)
    before = sent(job)
    job.train(10)
    assert sent(job) - before > BASE, "a new process does not know what was uploaded before"


@both
def test_a_job_with_another_number_of_ranks_resumes_with_them(make_job, place):
    job = trained(make_job(MEMORY, place.tier(keep=1), kind="adapted"), 4)
    job = relaunched(make_job, job, nodes=3)
    assert job.resume() == 4
    job.assert_holds(4)


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_damaged_object_of_one_checkpoint_does_not_harm_the_one_before(make_job, place):
    job = relaunched(make_job, trained(make_job(MEMORY, place.tier(keep=2), kind="adapted"), 4))
    with harmed(place, f"{folder_of(place, 4)}/__1_2.distcp", flip(BASE // 4)):
        assert job.resume() == 2
        job.assert_holds(2)


def test_a_damaged_file_is_not_restored_and_the_next_checkpoints_have_a_new_one(make_job, place):
    """In a directory, both checkpoints have this file: the job goes on from memory."""
    job = trained(make_job(MEMORY, place.tier(keep=2), kind="adapted"), 4)
    name = f"{folder_of(place, 4)}/__1_2.distcp"
    place.write(name, flip(BASE // 4)(place.read(name)))
    assert job.resume() == 4
    job.train(6)
    job = relaunched(make_job, job)
    assert job.resume() == 6
    job.assert_holds(6)


def test_plain_torch_loads_such_a_checkpoint(make_job, place):
    job = trained(make_job(MEMORY, place.tier(keep=1), kind="adapted"), 4)
    saved = {name.removeprefix("model."): t for name, t in job.states[4].items() if name.startswith("model.")}
    state: dict[str, Any] = {"model": {name: torch.zeros_like(tensor) for name, tensor in saved.items()}}
    dcp.load(state, checkpoint_id=place.root / folder_of(place, 4), no_dist=True)
    for name, tensor in saved.items():
        assert torch.equal(state["model"][name], tensor), name


def test_commands_know_the_file_of_frozen_parameters(make_job, place, tmp_path: Path):
    trained(make_job(MEMORY, place.tier(keep=1), kind="adapted"), 2)
    (secret := tmp_path / "secret").write_bytes(SECRET)
    secret.chmod(0o600)
    options = ("--secret-file", secret)
    (shown,) = hp_ext("checkpoints", "show", place.root, *options, "-o", "json").json["checkpoints"]
    assert [(rank["file"], rank["frozen_file"]) for rank in shown["ranks"]] == [
        (f"__{rank}_0.distcp", f"__{rank}_2.distcp") for rank in (0, 1)
    ]
    assert "__1_2.distcp, __1_0.distcp" in hp_ext("checkpoints", "show", place.root, *options).stdout
    assert hp_ext("checkpoints", "verify", place.root, *options).code == 0
    assert hp_ext("checkpoints", "copy", place.root, tmp_path / "copied" / JOB, *options).code == 0
    assert hp_ext("checkpoints", "verify", tmp_path / "copied" / JOB, *options).code == 0
    copied = tmp_path / "copied" / JOB / folder_of(place, 2) / "__1_2.distcp"
    copied.write_bytes(flip(BASE // 4)(copied.read_bytes()))
    done = hp_ext("checkpoints", "verify", tmp_path / "copied" / JOB, *options)
    assert done.code == 7
    assert "__1_2.distcp: CRC64-NVME is" in done.stdout


IMPOSSIBLE: tuple[Any, ...] = (
    [],
    {"__0_0.distcp": "__0_2.distcp"},
    {"__0_0.distcp": {"file": "__0_2.distcp", "nbytes": 1 << 40, "crc64nvme": "0" * 16}},
    {"__0_0.distcp": {"file": "__0_2.distcp", "nbytes": -1, "crc64nvme": "0" * 16}},
    {"__0_0.distcp": {"file": "__0_2.distcp", "nbytes": float("inf"), "crc64nvme": "0" * 16}},
    {"__0_0.distcp": {"file": "__0_2.distcp", "nbytes": 100, "crc64nvme": "no sum"}},
    {"__0_0.distcp": {"file": "../../secret", "nbytes": 100, "crc64nvme": "0" * 16}},
)


def test_a_manifest_with_an_impossible_frozen_part_is_refused(make_job, place):
    trained(make_job(MEMORY, place.tier(keep=1), kind="adapted"), 2)
    store, found = open_store(str(place.root)), Found(2, 1)
    document = Checkpoints(store, job=JOB, secret=SECRET).read(found)
    assert document["format"] == FORMAT == 2
    for frozen in IMPOSSIBLE:
        forged = sign({**document, "frozen": frozen}, SECRET)
        place.write(f"{found.folder}/manifest.json", json.dumps(forged, sort_keys=True).encode())
        with pytest.raises(CorruptSnapshotError, match=r"manifest.json: (the manifest does not list|lists no MAC)"):
            Checkpoints(store, job=JOB, secret=SECRET).read(found)
        for secret in (SECRET, None):
            (seen,) = take_inventory(store, job=JOB, secret=secret).seen
            assert seen.state == "damaged", frozen
            assert verify(store, seen, secret)
