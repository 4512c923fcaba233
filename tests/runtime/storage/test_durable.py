"""Checkpoints in a store: what makes one exist, what is refused, and what may be deleted."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.errors import (
    CorruptSnapshotError,
    HyperpodExtError,
    NotFoundError,
    StaleGenerationError,
    UnreachableError,
)
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import FORMAT, Manifest, crc64nvme, crc_text, save_id_of, sign
from hyperpod_ext.runtime.snapshot.tree import take_apart
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.file import FileStore
from hyperpod_ext.runtime.storage.names import MANIFEST, Found, folder_of, image_of
from hyperpod_ext.runtime.storage.open import open_store
from hyperpod_ext.runtime.storage.retention import to_keep, without_abandoned
from hyperpod_ext.runtime.storage.upload_split import partition_uploads

SECRET = b"0123456789abcdef0123456789abcdef"


class Rank:
    """One rank's snapshot, as its memory server holds it."""

    def __init__(self, rank: int, state: object, step: int = 100, generation: int = 1, world_size: int = 1) -> None:
        parts = take_apart(state, torch.Tensor)
        layout = Layout(parts)
        self.plan: Plan = layout.plan
        self.image = bytearray(layout.plan.nbytes)
        layout.write_frames(memoryview(self.image))
        for source, destination in zip(layout.locals, views(layout.plan, self.image), strict=True):
            destination.copy_(source)
        self.manifest: Manifest = sign(
            {
                "format": FORMAT,
                "job": "j",
                "rank": rank,
                "step": step,
                "generation": generation,
                "save_id": save_id_of(generation, step),
                "world_size": world_size,
                "plan": self.plan.digest,
                "nbytes": self.plan.nbytes,
                "crc64nvme": crc_text(crc64nvme(self.image)),
                "values": parts.values,
                "extras": {},
            },
            SECRET,
        )


def store_at(folder: Path, secret: bytes = SECRET, job: str = "j") -> Checkpoints:
    return Checkpoints(open_store(str(folder)), job=job, secret=secret)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return store_at(tmp_path)


def write(checkpoints: Checkpoints, step: int, generation: int = 1, *, manifest: bool = True) -> Found:
    """A checkpoint of one rank. Without `manifest`: one whose writers died just before."""
    one = Rank(0, {"t": torch.full((4,), float(step)), "n": step}, step, generation)
    folder = folder_of(step, generation)
    checkpoints.put_plan(folder, one.plan)
    checkpoints.store.put(f"{folder}/{image_of(0)}", memoryview(one.image), one.manifest["crc64nvme"])
    if manifest:
        macs = {image_of(0): checkpoints.mac(memoryview(one.image))}
        assert checkpoints.commit(folder, {0: one.manifest}, {0: image_of(0)}, macs)
    return Found(step, generation)


def steps(checkpoints: Checkpoints) -> list[int]:
    return [one.step for one in checkpoints.found()]


# --- what exists ----------------------------------------------------------------------------------


def test_an_empty_place_has_no_checkpoints(checkpoints):
    assert checkpoints.found() == []
    assert checkpoints.newest_generation() == 0
    assert checkpoints.prune(1, None, ()) == []


def test_checkpoints_are_found_newest_first_step_0_too(checkpoints):
    for step in (100, 0, 1_000_000_000, 20):
        write(checkpoints, step)
    assert steps(checkpoints) == [1_000_000_000, 100, 20, 0]


def test_of_one_step_the_later_generations_comes_first(checkpoints):
    for generation in (9, 10):
        write(checkpoints, 100, generation)
    assert [one.generation for one in checkpoints.found()] == [10, 9]


def test_without_its_manifest_there_is_no_checkpoint(checkpoints):
    write(checkpoints, 100)
    write(checkpoints, 200, manifest=False)
    assert steps(checkpoints) == [100]
    with pytest.raises(NotFoundError):
        checkpoints.read(Found(200, 1))


def test_a_checkpoint_comes_back_as_it_was_written(checkpoints):
    found = write(checkpoints, 100)
    manifest = checkpoints.read(found)
    assert (manifest["step"], manifest["generation"], manifest["world_size"]) == (100, 1, 1)
    snapshot, name = manifest["ranks"]["0"], manifest["files"]["0"]
    plan = checkpoints.read_plan(found.folder, snapshot["plan"])
    image = bytearray(plan.nbytes)
    checkpoints.store.read_into(f"{found.folder}/{name}", memoryview(image))
    assert crc_text(crc64nvme(image)) == snapshot["crc64nvme"]
    assert torch.equal(views(plan, image)[0], torch.full((4,), 100.0))
    assert snapshot["values"] == [100]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_loads_it(checkpoints, tmp_path):
    found = write(checkpoints, 100)
    state = {"t": torch.zeros(4), "n": 0}
    dcp.load(state, checkpoint_id=tmp_path / found.folder)
    assert torch.equal(state["t"], torch.full((4,), 100.0))
    assert state["n"] == 100


def test_notes_between_nodes_are_gone_once_it_is_committed(checkpoints):
    folder = folder_of(100, 1)
    checkpoints.put_record(folder, 0, [])
    checkpoints.put_done(folder, 0, {})
    write(checkpoints, 100)
    names = {entry.name.rpartition("/")[2].partition("-")[0] for entry in checkpoints.store.list(f"{folder}/")}
    assert names == {"__0_0.distcp", "__0_1.distcp", ".metadata", "plan", MANIFEST}


# --- what is refused ------------------------------------------------------------------------------


def manifest_file(tmp_path: Path, found: Found) -> Path:
    return tmp_path / found.folder / MANIFEST


def refused(checkpoints: Checkpoints, found: Found) -> str:
    """What is said of a manifest that is there and must not be used; it names the place."""
    assert found in checkpoints.found()
    with pytest.raises(CorruptSnapshotError) as caught:
        checkpoints.read(found)
    assert str(caught.value).startswith(f"{checkpoints.store.url}/{found.folder}/{MANIFEST}: ")
    return str(caught.value)


def test_an_empty_manifest_is_refused(checkpoints, tmp_path):
    found = write(checkpoints, 100)
    manifest_file(tmp_path, found).write_bytes(b"")
    assert "not JSON" in refused(checkpoints, found)


def test_a_manifest_cut_off_anywhere_is_refused(checkpoints, tmp_path):
    found = write(checkpoints, 100)
    whole = manifest_file(tmp_path, found).read_bytes()
    for length in range(0, len(whole), 37):
        manifest_file(tmp_path, found).write_bytes(whole[:length])
        assert "not JSON" in refused(checkpoints, found)


def test_a_manifest_with_a_flipped_bit_is_refused(checkpoints, tmp_path):
    found = write(checkpoints, 100)
    whole = manifest_file(tmp_path, found).read_bytes()
    chance = random.Random(0)
    for position in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << chance.randrange(8)
        if json_or_none(bytes(flipped)) == json.loads(whole):
            continue  # a blank became another blank
        manifest_file(tmp_path, found).write_bytes(flipped)
        refused(checkpoints, found)


def json_or_none(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


@pytest.mark.parametrize("document", ["[]", "7", "null", '"text"', "{}", "[" * 100_000])
def test_json_that_is_no_manifest_is_refused(checkpoints, tmp_path, document):
    found = write(checkpoints, 100)
    manifest_file(tmp_path, found).write_text(document)
    refused(checkpoints, found)


def rewrite(tmp_path: Path, found: Found, secret: bytes | None = SECRET, **changes: object) -> None:
    """Change a manifest, and sign it again unless `secret` is None."""
    file = manifest_file(tmp_path, found)
    document = json.loads(file.read_bytes()) | changes
    file.write_text(json.dumps(sign(document, secret) if secret else document))


def test_a_newer_format_is_refused_with_what_to_do(checkpoints, tmp_path):
    found = write(checkpoints, 100)
    rewrite(tmp_path, found, format=FORMAT + 1)
    assert f"format {FORMAT + 1} is newer than {FORMAT}" in refused(checkpoints, found)


def test_fields_of_a_newer_writer_are_no_reason_to_refuse(checkpoints, tmp_path):
    found = write(checkpoints, 100)
    rewrite(tmp_path, found, colour="blue")
    assert checkpoints.read(found)["colour"] == "blue"


def test_a_checkpoint_of_another_job_is_refused(checkpoints, tmp_path):
    found = write(checkpoints, 100)
    assert "belongs to job 'j', not to 'other'" in refused(store_at(tmp_path, job="other"), found)


def test_a_checkpoint_signed_with_another_secret_is_refused(checkpoints, tmp_path):
    found = write(checkpoints, 100)
    assert "not signed with this job's secret" in refused(store_at(tmp_path, secret=b"x" * 32), found)


@pytest.mark.parametrize("signature", ["", None, 7, "é", "\ud800", "0" * 64])
def test_a_signature_that_is_none_is_refused(checkpoints, tmp_path, signature):
    found = write(checkpoints, 100)
    rewrite(tmp_path, found, secret=None, signature=signature)
    assert "not signed with this job's secret" in refused(checkpoints, found)


def test_a_manifest_moved_to_another_folder_is_refused(checkpoints, tmp_path):
    older, newer = write(checkpoints, 100), write(checkpoints, 200)
    manifest_file(tmp_path, newer).write_bytes(manifest_file(tmp_path, older).read_bytes())
    assert "is the manifest of step 100, generation 1, but is in the folder of another" in refused(checkpoints, newer)


def test_a_manifest_moved_to_another_generations_folder_of_its_step_is_refused(checkpoints, tmp_path):
    older, newer = write(checkpoints, 100, 1), write(checkpoints, 100, 2)
    manifest_file(tmp_path, newer).write_bytes(manifest_file(tmp_path, older).read_bytes())
    assert "is the manifest of step 100, generation 1, but is in the folder of another" in refused(checkpoints, newer)


def test_a_plan_that_was_changed_is_refused(checkpoints, tmp_path):
    found = write(checkpoints, 100)
    (file,) = (tmp_path / found.folder).glob("plan-*.json")
    digest = checkpoints.read(found)["ranks"]["0"]["plan"]
    file.write_text(file.read_text().replace('"nbytes":', '"nbytes":1'))
    with pytest.raises(CorruptSnapshotError, match="does not have the digest in its manifest"):
        checkpoints.read_plan(found.folder, digest)
    file.write_text("")
    with pytest.raises(CorruptSnapshotError, match=r"plan-.*\.json: not JSON"):
        checkpoints.read_plan(found.folder, digest)


# --- several nodes --------------------------------------------------------------------------------


def records_of(ranks: list[Rank], per_node: int) -> dict[int, list[Manifest]]:
    found: dict[int, list[Manifest]] = {}
    for one in ranks:
        found.setdefault(one.manifest["rank"] // per_node, []).append(one.manifest)
    return found


def test_equal_images_are_uploaded_once():
    ranks = [Rank(rank, {"t": torch.ones(100)}) for rank in range(4)]
    files, uploads = partition_uploads(records_of(ranks, per_node=2))
    assert uploads == {0: [0], 1: []}
    assert files == dict.fromkeys(range(4), image_of(0))


def test_different_images_are_uploaded_where_they_are():
    ranks = [Rank(rank, {"t": torch.full((100,), float(rank))}) for rank in range(4)]
    files, uploads = partition_uploads(records_of(ranks, per_node=2))
    assert uploads == {0: [0, 1], 1: [2, 3]}
    assert files == {rank: image_of(rank) for rank in range(4)}


def test_equal_bytes_with_different_values_are_different():
    ranks = [Rank(rank, {"t": torch.ones(100), "n": rank}) for rank in range(2)]
    files, _ = partition_uploads(records_of(ranks, per_node=1))
    assert files == {0: image_of(0), 1: image_of(1)}


def test_least_to_do_is_counted_in_bytes():
    sizes = {"a": 1000, "b": 10, "c": 10}
    records: dict[int, list[Manifest]] = {
        node: [
            {"rank": 3 * node + index, "plan": name, "crc64nvme": "", "nbytes": nbytes, "values": []}
            for index, (name, nbytes) in enumerate(sizes.items())
        ]
        for node in (0, 1)
    }
    assert partition_uploads(records)[1] == {0: [0], 1: [4, 5]}


def test_what_several_nodes_hold_goes_to_the_one_with_least_to_do():
    """Hybrid sharding: nodes 0 and 1 hold the same four shards."""
    ranks = [Rank(rank, {"t": torch.full((100,), float(rank % 4))}) for rank in range(8)]
    files, uploads = partition_uploads(records_of(ranks, per_node=4))
    assert [len(its) for its in uploads.values()] == [2, 2]
    assert sorted(set(files.values())) == sorted(image_of(rank) for its in uploads.values() for rank in its)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=10), st.integers(1, 4))
def test_every_rank_has_a_file_that_somebody_who_holds_it_uploads(contents, per_node):
    ranks = [Rank(rank, {"t": torch.full((size,), float(fill))}) for rank, (fill, size) in enumerate(contents)]
    records = records_of(ranks, per_node)
    files, uploads = partition_uploads(records)
    shuffled = dict(reversed(list(records.items())))
    assert partition_uploads(shuffled) == (
        files,
        {node: uploads[node] for node in shuffled},
    )  # as every node computes it
    uploaded = {image_of(rank): (node, ranks[rank]) for node, its in uploads.items() for rank in its}
    for rank, one in enumerate(ranks):
        node, source = uploaded[files[rank]]
        assert source.image == one.image
        assert source.manifest["rank"] // per_node == node
    assert set(uploaded) == set(files.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_nodes_that_finish_at_once_write_one_manifest(tmp_path):
    ranks = [Rank(rank, {"t": torch.full((10,), float(rank))}, world_size=2) for rank in (0, 1)]
    folder, everyone = folder_of(100, 1), {one.manifest["rank"]: one.manifest for one in ranks}
    created: list[bool] = []
    meet = threading.Barrier(2)

    def node(number: int) -> None:
        checkpoints, mine = store_at(tmp_path), ranks[number]
        checkpoints.put_plan(folder, mine.plan)
        checkpoints.put_record(folder, number, [mine.manifest])
        while len(checkpoints.progress(folder).announced) < 2:
            pass
        files, uploads = partition_uploads({node: checkpoints.record(folder, node) for node in (0, 1)})
        for rank in uploads[number]:
            crc = mine.manifest["crc64nvme"]
            checkpoints.store.put(f"{folder}/{files[rank]}", memoryview(mine.image), crc)
        macs = {files[rank]: checkpoints.mac(memoryview(mine.image)) for rank in uploads[number]}
        checkpoints.put_done(folder, number, macs)
        while checkpoints.progress(folder).done != {0, 1}:
            pass
        meet.wait()
        all_macs = checkpoints.macs(folder, 0) | checkpoints.macs(folder, 1)
        meet.wait()  # who commits takes the notes away
        created.append(checkpoints.commit(folder, everyone, files, all_macs))

    threads = [threading.Thread(target=node, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False, True]
    manifest = store_at(tmp_path).read(Found(100, 1))
    assert manifest["files"] == {"0": image_of(0), "1": image_of(1)}
    assert not list((tmp_path / folder).glob("node-*"))
    state = {"t": torch.zeros(10)}
    dcp.load(state, checkpoint_id=tmp_path / folder)
    assert torch.equal(state["t"], torch.zeros(10))  # rank 0's: not sharded, so the lowest counts


def test_a_record_that_is_not_of_this_job_is_refused(checkpoints, tmp_path):
    folder, one = folder_of(100, 1), Rank(0, {"t": torch.ones(1)})
    checkpoints.put_record(folder, 0, [one.manifest])
    assert checkpoints.progress(folder).announced == {0}
    assert checkpoints.record(folder, 0) == [one.manifest]
    with pytest.raises(CorruptSnapshotError, match="not signed"):
        store_at(tmp_path, secret=b"x" * 32).record(folder, 0)


def test_values_of_many_ranks_are_read_and_what_nobody_could_read_is_not_committed(checkpoints, monkeypatch):
    """A small blob has a limit of its own, which values of all ranks together may pass."""
    large, get = "x" * 3000, checkpoints.store.get
    monkeypatch.setattr(checkpoints.store, "get", lambda name, limit=2000, **more: get(name, limit, **more))
    ranks = [Rank(rank, {"t": torch.zeros(2), "n": large}, world_size=2) for rank in range(2)]
    folder, macs = folder_of(100, 1), {}
    for rank, one in enumerate(ranks):
        checkpoints.put_plan(folder, one.plan)
        checkpoints.store.put(f"{folder}/{image_of(rank)}", memoryview(one.image), one.manifest["crc64nvme"])
        macs[image_of(rank)] = checkpoints.mac(memoryview(one.image))
    checkpoints.put_record(folder, 0, [one.manifest for one in ranks])
    assert len(checkpoints.record(folder, 0)) == 2
    manifests = {rank: one.manifest for rank, one in enumerate(ranks)}
    files = {rank: image_of(rank) for rank in range(2)}
    with monkeypatch.context() as limited:
        limited.setattr("hyperpod_ext.runtime.storage.checkpoints.DOCUMENT_BYTES", 4000)
        with pytest.raises(HyperpodExtError, match="its manifest would have") as caught:
            checkpoints.commit(folder, manifests, files, macs)
    assert (checkpoints.found(), "tensors" in caught.value.hint) == ([], True)
    assert checkpoints.commit(folder, manifests, files, macs)
    assert checkpoints.read(Found(100, 1))["ranks"]["1"]["values"] == [large]


@pytest.mark.parametrize("text", ["", "{}", '{"manifests": 7}', '{"manifests": [7]}'])
def test_a_record_that_is_none_is_an_error_of_ours(checkpoints, tmp_path, text):
    (tmp_path / folder_of(100, 1)).mkdir()
    (tmp_path / folder_of(100, 1) / "node-1.json").write_text(text)
    with pytest.raises(HyperpodExtError, match=r"node-1\.json"):
        checkpoints.record(folder_of(100, 1), 1)


# --- generations ----------------------------------------------------------------------------------


def test_a_run_may_claim_its_generations_as_often_as_it_likes(checkpoints):
    for generation in (1, 1, 2, 2, 1):
        checkpoints.fence(generation, 0, "this run")
    assert checkpoints.newest_generation() == 2


def test_a_generation_of_another_run_is_refused(checkpoints):
    checkpoints.fence(1, 0, "first run")
    with pytest.raises(StaleGenerationError, match="generation 1 of j belongs to another run"):
        checkpoints.fence(1, 0, "second run")


def test_a_run_that_another_has_followed_is_refused(checkpoints):
    """A node that was cut off for an hour comes back to find that the job was started anew."""
    checkpoints.fence(1, 0, "first run")
    checkpoints.fence(2, 50, "second run")
    with pytest.raises(StaleGenerationError, match="another run of the job has begun generation 2"):
        checkpoints.fence(1, 0, "first run")


def test_of_two_runs_that_claim_at_once_one_is_refused(tmp_path):
    refused: list[str] = []

    def claim(run: str) -> None:
        try:
            store_at(tmp_path).fence(1, 0, run)
        except StaleGenerationError:
            refused.append(run)

    threads = [threading.Thread(target=claim, args=(f"run {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7


def test_the_newest_generation_is_one_that_wrote_or_one_that_claimed(checkpoints):
    write(checkpoints, 100, generation=3, manifest=False)
    assert checkpoints.newest_generation() == 3
    checkpoints.fence(5, 0, "run")
    assert checkpoints.newest_generation() == 5


def test_checkpoints_that_a_later_generation_gave_up_are_not_found(checkpoints):
    for step in (50, 100):
        write(checkpoints, step, generation=1)
    checkpoints.fence(1, 0, "run")
    assert steps(checkpoints) == [100, 50]
    checkpoints.fence(2, 60, "run")
    assert steps(checkpoints) == [100, 50]  # until it has saved something itself
    write(checkpoints, 70, generation=2)
    assert steps(checkpoints) == [70, 50]


def test_a_run_that_claimed_and_saved_nothing_hides_nothing(checkpoints):
    """It began at step 0 and died; the run before it, or the next, has all that was saved."""
    checkpoints.fence(1, 0, "A")
    for step in (0, 100):
        write(checkpoints, step)
    checkpoints.fence(2, 0, "B")
    for step in (200, 300):
        write(checkpoints, step)
    assert steps(checkpoints) == [300, 200, 100, 0]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), unique=True, min_size=1, max_size=8),
    st.dictionaries(st.integers(1, 6), st.integers(0, 9)),
)
def test_where_there_is_a_checkpoint_one_is_found(saved, starts):
    """What is saved must never look like a place where a job may start from nothing."""
    saving = {generation for _, generation in saved}
    counting = {generation: step for generation, step in starts.items() if generation in saving}
    assert without_abandoned([Found(*one) for one in saved], counting)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"generation": 2}', '{"step": "6", "run": "B"}', '{"step": 60}'])
def test_a_claim_that_is_damaged_is_an_error_where_it_may_matter(checkpoints, tmp_path, text):
    """Taken for none, it would bring back the steps that were given up."""
    checkpoints.fence(1, 0, "A")
    write(checkpoints, 100)
    checkpoints.fence(2, 60, "B")
    (tmp_path / "generations" / "000002.json").write_text(text)
    assert steps(checkpoints) == [100], "generation 2 has saved nothing"
    write(checkpoints, 70, generation=2)
    with pytest.raises(CorruptSnapshotError, match="it is unknown which steps generation 2 abandoned") as raised:
        checkpoints.found()
    assert "000002.json" in raised.value.message
    assert "backup" in raised.value.hint
    with pytest.raises(StaleGenerationError):
        checkpoints.fence(2, 0, "C")
    (tmp_path / "generations" / "000002.json").unlink()  # as the hint says
    assert steps(checkpoints) == [100, 70]


def test_a_claim_that_others_wrote_lets_nothing_be_read_or_written(checkpoints):
    checkpoints.fence(1, 0, "A")
    write(checkpoints, 100)
    write(checkpoints, 70, generation=2)
    Checkpoints(checkpoints.store, job="j", secret=b"x" * 32).fence(2, 60, "B")
    for refused in (checkpoints.found, lambda: checkpoints.prune(1, None, ())):
        with pytest.raises(CorruptSnapshotError, match=r"not signed with this job's secret, so it is unknown"):
            refused()
    with pytest.raises(StaleGenerationError, match="not signed with this job's secret"):
        checkpoints.fence(1, 0, "A")


def test_claims_of_the_older_form_count_beside_a_signed_checkpoint_only(checkpoints, tmp_path):
    """As they were written before they were signed."""
    for step in (50, 100):
        write(checkpoints, step)
    write(checkpoints, 70, generation=2)
    claim = tmp_path / "generations" / "000002.json"
    claim.parent.mkdir()
    claim.write_text('{"generation": 2, "step": 60, "run": "B"}')
    assert steps(checkpoints) == [70, 50]
    with pytest.raises(StaleGenerationError, match="has no signature"):
        checkpoints.fence(1, 0, "A")
    claim.write_text('{"generation": 2, "step": 71, "run": "B"}')  # it has saved a step before it began
    with pytest.raises(CorruptSnapshotError, match="has no signature, so it is unknown"):
        checkpoints.found()
    claim.write_text('{"generation": 2, "step": 60, "run": "B"}')
    assert steps(store_at(tmp_path, secret=b"x" * 32)) == [100, 70, 50], (
        "nothing there is of this job, nor is the claim"
    )


def test_a_claim_is_of_its_own_generation_only(checkpoints, tmp_path):
    checkpoints.fence(1, 0, "A")
    claims = tmp_path / "generations"
    (claims / "000003.json").write_bytes((claims / "000001.json").read_bytes())
    assert checkpoints.fence_of(3) is None
    checkpoints.check_not_followed(2, "A")
    write(checkpoints, 30, generation=3)
    with pytest.raises(StaleGenerationError, match="is the claim file of generation 1"):
        checkpoints.check_not_followed(2, "A")


def test_claims_are_read_only_where_they_may_matter_and_go_with_what_they_were_for(checkpoints, tmp_path, monkeypatch):
    for generation in range(1, 9):
        checkpoints.fence(generation, generation * 10 - 10, "run")
        if generation != 6:
            write(checkpoints, generation * 10, generation)
    checkpoints.prune(3, None, ())
    assert steps(checkpoints) == [80, 70, 50]
    assert sorted(int(file.stem) for file in (tmp_path / "generations").iterdir()) == [5, 6, 7, 8]
    read: list[str] = []
    get = checkpoints.store.get
    monkeypatch.setattr(checkpoints.store, "get", lambda name, *limit: [read.append(name), get(name)][1])
    checkpoints.found()
    assert sorted(read) == ["generations/000007.json", "generations/000008.json"]


def test_a_generation_gives_up_only_what_was_saved_after_it_began():
    found = [Found(10, 1), Found(20, 1), Found(20, 2), Found(30, 3)]
    assert without_abandoned(found, {1: 0, 2: 10, 3: 20}) == [Found(30, 3), Found(20, 2), Found(10, 1)]


# --- retention ------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_multiples_and_milestones(checkpoints):
    for step in (0, 10, 25, 30, 50, 60, 70, 75, 80):
        write(checkpoints, step)
    gone = checkpoints.prune(2, 25, {10})
    assert steps(checkpoints) == [80, 75, 50, 25, 10, 0]
    assert sorted(gone) == [folder_of(step, 1) for step in (30, 60, 70)]
    assert sorted(checkpoints.store.folders()) == sorted(one.folder for one in checkpoints.found())


@given(st.lists(st.integers(0, 60), unique=True, max_size=12), st.integers(0, 4), st.none() | st.integers(1, 20))
def test_the_newest_is_always_kept(found, keep, every):
    kept = to_keep([Found(step, 1) for step in found], keep, every, ())
    assert {one.step for one in kept} >= set(sorted(found, reverse=True)[: max(keep, 1)])


def test_a_checkpoint_that_the_job_has_not_signed_takes_no_place_and_is_not_deleted(checkpoints, tmp_path):
    for step in (10, 20, 25, 30, 40):
        write(checkpoints, step)
    for step in (25, 40):
        file = manifest_file(tmp_path, Found(step, 1))
        file.write_bytes(file.read_bytes()[:-1])
    assert checkpoints.prune(2, None, ()) == [folder_of(10, 1)]
    assert steps(checkpoints) == [40, 30, 25, 20]


def test_what_was_left_unfinished_goes_with_the_next_and_what_is_being_written_stays(checkpoints):
    write(checkpoints, 10, manifest=False)
    write(checkpoints, 20)
    write(checkpoints, 30, manifest=False)
    assert checkpoints.prune(1, None, ()) == [folder_of(10, 1)]
    assert list(checkpoints.store.folders()) == [folder_of(20, 1), folder_of(30, 1)]


def test_the_newest_step_that_another_generation_is_writing_again_stays(checkpoints):
    write(checkpoints, 100, 1)
    being_written = write(checkpoints, 100, 2, manifest=False)
    assert checkpoints.prune(1, None, ()) == []
    assert checkpoints.store.list(f"{being_written.folder}/")


def test_a_history_that_was_given_up_is_deleted_once_the_new_one_has_passed_it(checkpoints):
    for step in (50, 100):
        write(checkpoints, step, generation=1)
    checkpoints.fence(2, 60, "run")
    write(checkpoints, 90, generation=2)
    assert checkpoints.prune(3, 50, ()) == []
    write(checkpoints, 110, generation=2)
    assert checkpoints.prune(3, 50, ()) == [folder_of(100, 1)]
    assert steps(checkpoints) == [110, 90, 50]


class DyingStore(FileStore):
    """A directory whose writer dies after so many deletions."""

    left = 0

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            if self.left == 0:
                raise UnreachableError("died")
            self.left -= 1
            super().delete([name])


@pytest.mark.parametrize("deletions", range(6))
def test_a_writer_that_dies_while_it_deletes_leaves_no_half_checkpoint(tmp_path, deletions):
    for step in (10, 20):
        write(store_at(tmp_path), step)
    store = DyingStore(tmp_path)
    checkpoints = Checkpoints(store, job="j", secret=SECRET)
    blobs = {entry.name for entry in store.list(folder_of(10, 1))}
    store.left = deletions
    with pytest.raises(UnreachableError):
        checkpoints.prune(1, None, ())
    whole = {entry.name for entry in store.list(folder_of(10, 1))} == blobs
    assert steps(checkpoints) == ([20, 10] if whole else [20])
    assert whole == (deletions == 0)
    store.left = 100
    assert checkpoints.prune(1, None, ()) == [folder_of(10, 1)]  # the next one ends the work
    assert list(store.folders()) == [folder_of(20, 1)]


def test_files_of_others_are_left_alone(checkpoints, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-old").mkdir()
    (tmp_path / "step-old" / "weights.pt").write_text("mine")
    for step in (10, 20):
        write(checkpoints, step)
    checkpoints.prune(1, None, ())
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "step-old" / "weights.pt").exists()
    assert steps(checkpoints) == [20]
