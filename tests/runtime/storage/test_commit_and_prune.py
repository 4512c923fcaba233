"""A checkpoint is committed with all its files there, of one commit, and uploads on their way are not deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import FORMAT, Manifest, crc64nvme, crc_text, save_id_of, sign
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.copy import copy
from hyperpod_ext.runtime.storage.inventory import select_prunable, take_inventory
from hyperpod_ext.runtime.storage.names import MANIFEST, Found, folder_of, image_of, plan_name
from hyperpod_ext.runtime.storage.open import open_store

SECRET = b"0123456789abcdef0123456789abcdef"
JOB = "j"
PLAN = Plan(["V"], (), 1000)
WORLD = 2


def checkpoints_at(folder: Path) -> Checkpoints:
    return Checkpoints(open_store(str(folder)), job=JOB, secret=SECRET)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return checkpoints_at(tmp_path / JOB)


def image(rank: int, step: int) -> memoryview:
    return memoryview(bytes([(step + rank) % 256]) * PLAN.nbytes)


def snapshot(rank: int, step: int, generation: int = 1, **more: object) -> Manifest:
    one = {"format": FORMAT, "job": JOB, "rank": rank, "step": step, "generation": generation, "world_size": WORLD}
    content = {"plan": PLAN.digest, "nbytes": PLAN.nbytes, "crc64nvme": crc_text(crc64nvme(image(rank, step)))}
    one |= content | {"save_id": save_id_of(generation, step), "values": [step], "extras": {}}
    return sign(one | more, SECRET)


def bring(checkpoints: Checkpoints, step: int, generation: int = 1, *, ranks: tuple[int, ...] = (0, 1)) -> str:
    """The files of these ranks, and what their nodes tell each other; nothing is committed."""
    folder = folder_of(step, generation)
    checkpoints.put_plan(folder, PLAN)
    for rank in ranks:
        one = snapshot(rank, step, generation)
        checkpoints.put_record(folder, rank, [one])
        checkpoints.store.put(f"{folder}/{image_of(rank)}", image(rank, step), one["crc64nvme"])
    return folder


def commit(checkpoints: Checkpoints, step: int, generation: int = 1, **parts: Any) -> bool:
    manifests = parts.get("manifests") or {rank: snapshot(rank, step, generation) for rank in range(WORLD)}
    files = {rank: image_of(rank) for rank in manifests}
    macs = {files[rank]: checkpoints.mac(image(rank, step)) for rank in files}
    return checkpoints.commit(folder_of(step, generation), manifests, files, macs, {PLAN.digest: PLAN}.get)


def save(checkpoints: Checkpoints, step: int, generation: int = 1) -> str:
    folder = bring(checkpoints, step, generation)
    assert commit(checkpoints, step, generation)
    return folder


# --- all files are there -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [image_of(0), image_of(1), plan_name(PLAN.digest)])
def test_a_checkpoint_that_lacks_a_file_is_not_committed(checkpoints, name):
    """Somebody has deleted it since it was brought."""
    folder = bring(checkpoints, 10)
    checkpoints.store.delete([f"{folder}/{name}"])
    with pytest.raises(CorruptSnapshotError, match=f"{name} does not exist"):
        commit(checkpoints, 10)
    assert checkpoints.found() == []
    bring(checkpoints, 10)
    assert commit(checkpoints, 10)


def test_nor_is_one_with_a_file_of_another_size(checkpoints):
    folder = bring(checkpoints, 10)
    short = image(1, 10)[:999]
    checkpoints.store.put(f"{folder}/{image_of(1)}", short, crc_text(crc64nvme(short)))
    with pytest.raises(CorruptSnapshotError, match=r"__1_0\.distcp has 999 bytes, not 1000"):
        commit(checkpoints, 10)
    assert checkpoints.found() == []


@pytest.mark.parametrize("name", ["__0_1.distcp", ".metadata"])
def test_what_is_there_for_torch_is_looked_for_too(checkpoints, monkeypatch, name):
    bring(checkpoints, 10)
    put = checkpoints.store.put
    monkeypatch.setattr(checkpoints.store, "put", lambda to, *more: None if to.endswith(f"/{name}") else put(to, *more))
    with pytest.raises(CorruptSnapshotError, match=f"{name} does not exist"):
        commit(checkpoints, 10)


def test_a_commit_lists_its_folder_once(checkpoints, monkeypatch):
    """A listing is a request to S3, of the dearer kind."""
    folder, listed = bring(checkpoints, 10), []
    lists = checkpoints.store.list
    monkeypatch.setattr(checkpoints.store, "list", lambda prefix="": [listed.append(prefix), lists(prefix)][1])
    assert commit(checkpoints, 10)
    assert listed == [f"{folder}/"]
    names = [entry.name for entry in lists(f"{folder}/")]
    assert not any("node-" in name for name in names), "notes are gone"


def test_a_listing_that_lacks_what_is_being_replaced_is_taken_again(checkpoints, monkeypatch):
    """Another node commits in the same moment: it renames the same files for torch onto those that are there."""
    bring(checkpoints, 10)
    lists, calls = checkpoints.store.list, []

    def first_without(prefix: str = "") -> Any:
        calls.append(prefix)
        found = lists(prefix)
        return [entry for entry in found if not entry.name.endswith(".metadata")] if len(calls) == 1 else found

    monkeypatch.setattr(checkpoints.store, "list", first_without)
    assert commit(checkpoints, 10)


# --- what is on its way stays -------------------------------------------------------------------------


def goes_back(checkpoints: Checkpoints) -> str:
    """Run 1 has saved 480 and 490, run 2 begins at step 100, and its first one is on its way: its folder."""
    checkpoints.fence(1, 0, "run 1")
    for step in (480, 490):
        save(checkpoints, step)
    checkpoints.fence(2, 100, "run 2")
    return bring(checkpoints, 110, 2, ranks=(0,))


def test_an_upload_of_a_run_that_goes_back_is_not_deleted_by_the_run_before(checkpoints):
    """Which has not noticed yet that it was followed."""
    folder = goes_back(checkpoints)
    save(checkpoints, 500)
    assert checkpoints.prune(1, None, ()) == [folder_of(480, 1), folder_of(490, 1)]
    assert checkpoints.store.list(f"{folder}/{image_of(0)}")
    save(checkpoints, 110, 2)
    assert checkpoints.found() == [Found(110, 2)]
    assert take_inventory(checkpoints.store, secret=SECRET).seen[-1].state == "complete"


def test_nor_by_an_operator(checkpoints):
    folder = goes_back(checkpoints)
    inventory = take_inventory(checkpoints.store, job=JOB, secret=SECRET)
    gone = select_prunable(inventory, 1, None, ())
    assert [one.found.folder for one in gone] == [folder_of(480, 1)]
    assert folder in [one.found.folder for one in inventory.seen if one.state == "unfinished"]


def test_it_goes_once_its_generation_or_a_later_one_has_come_further(checkpoints):
    folder = goes_back(checkpoints)
    checkpoints.fence(3, 490, "run 3")
    save(checkpoints, 500, 3)
    inventory = take_inventory(checkpoints.store, job=JOB, secret=SECRET)
    assert folder in [one.found.folder for one in select_prunable(inventory, 9, None, ())]
    assert checkpoints.prune(9, None, ()) == [folder]


# --- of one commit ------------------------------------------------------------------------------------


def replay(checkpoints: Checkpoints, source: Manifest, step: int, node: int = 1) -> str:
    """What somebody without the secret can put there: a note with a manifest that the job has signed once."""
    folder = folder_of(step, 1)
    assert checkpoints.store.put_new(f"{folder}/node-{node}.json", json.dumps({"manifests": [source]}).encode())
    return folder


@pytest.mark.parametrize("of", [snapshot(1, 10), snapshot(1, 20, 2), snapshot(1, 20, save_id="g1-s10")])
def test_a_note_of_another_commit_is_refused(checkpoints, of):
    folder = replay(checkpoints, of, 20)
    with pytest.raises(CorruptSnapshotError, match=r"node-1\.json: .* rank 1 .* belongs to another checkpoint"):
        checkpoints.record(folder, 1)


def test_a_node_notices_that_another_note_lies_in_the_place_of_its_own(checkpoints):
    mine = snapshot(1, 20)
    folder = replay(checkpoints, snapshot(1, 10), 20)
    with pytest.raises(CorruptSnapshotError, match=r"node-1\.json"):
        checkpoints.put_record(folder, 1, [mine])
    folder = replay(checkpoints, snapshot(0, 30), 30)  # of this step, and of another node
    with pytest.raises(
        CorruptSnapshotError, match=r"node-1\.json: exists already, and lists other snapshots than node 1 has"
    ):
        checkpoints.put_record(folder, 1, [snapshot(1, 30)])


def test_a_node_that_tries_once_more_finds_its_own_note(checkpoints):
    mine = [snapshot(1, 20, values=[float("nan")])]
    for _ in range(2):
        checkpoints.put_record(folder_of(20, 1), 1, mine)


def other_ranks() -> list[Manifest]:
    return [snapshot(1, 10), snapshot(1, 20, 2), snapshot(0, 20), snapshot(1, 20, save_id="g1-s10")]


@pytest.mark.parametrize("other", other_ranks())
def test_snapshots_of_several_commits_are_not_committed(checkpoints, other):
    bring(checkpoints, 20)
    with pytest.raises(CorruptSnapshotError, match="rank 1: its snapshot is of rank"):
        commit(checkpoints, 20, manifests={0: snapshot(0, 20), 1: other})
    assert checkpoints.found() == []


@pytest.mark.parametrize("other", other_ranks())
def test_nor_read_where_an_earlier_version_has_committed_them(checkpoints, tmp_path, other):
    folder = save(checkpoints, 20)
    file = tmp_path / JOB / folder / MANIFEST
    document = json.loads(file.read_bytes())
    document["ranks"]["1"] = other
    file.write_text(json.dumps(sign(document, SECRET)))
    with pytest.raises(CorruptSnapshotError, match="rank 1: its snapshot is of rank"):
        checkpoints.read(Found(20, 1))
    save(checkpoints, 10)
    assert checkpoints.prune(1, None, ()) == [], "nothing is deleted for it"


@pytest.mark.parametrize("none", [7, {}, {"rank": 1}])
def test_a_manifest_of_a_checkpoint_without_its_snapshots_is_an_error_of_ours(checkpoints, tmp_path, none):
    file = tmp_path / JOB / save(checkpoints, 20) / MANIFEST
    document = json.loads(file.read_bytes())
    document["ranks"]["1"] = none
    file.write_text(json.dumps(sign(document, SECRET)))
    with pytest.raises(CorruptSnapshotError, match="rank 1: its snapshot is invalid"):
        checkpoints.read(Found(20, 1))


def test_what_else_the_job_has_signed_is_no_note_of_a_snapshot(checkpoints):
    """The manifest of a whole checkpoint, put back where retention has deleted it."""
    checkpoint = json.loads(checkpoints.store.get(f"{save(checkpoints, 20)}/{MANIFEST}"))
    with pytest.raises(CorruptSnapshotError, match=r"node-1\.json: not a list of manifests of snapshots"):
        checkpoints.record(replay(checkpoints, checkpoint, 20), 1)


# --- notes that stayed --------------------------------------------------------------------------------


def test_a_committed_checkpoint_is_not_being_written_whatever_notes_lie_there(checkpoints, tmp_path):
    """A node that failed after the commit says so beside it."""
    folder = save(checkpoints, 10)
    there = checkpoints_at(tmp_path / "there" / JOB)
    save(there, 10)
    manifest = checkpoints.store.get(f"{folder}/{MANIFEST}")
    there.store.delete([f"{folder}/{MANIFEST}"])
    there.store.put(f"{folder}/{MANIFEST}", memoryview(manifest), crc_text(crc64nvme(manifest)))
    there.put_failed(folder, 0)
    (seen,) = take_inventory(checkpoints.store, job=JOB, secret=SECRET).seen
    destination = take_inventory(there.store, job=JOB, secret=SECRET)
    assert destination.seen[0].state == "complete"
    assert not copy(checkpoints.store, seen, destination, SECRET).new
