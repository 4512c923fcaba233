"""`hp-ext checkpoints` on folders that the real code wrote, and on what can become of them."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import s3_server
import torch
import torch.distributed.checkpoint as dcp
import waiting
from command import call_hp_ext as hp_ext
from forged import forge
from local_place import LocalPlace
from served import answers

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.jobs.local import store as local_store
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.memory_server.server import Server
from hyperpod_ext.runtime.memory_server.slots.slots import State
from hyperpod_ext.runtime.memory_server.state import NodeMemory
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.manifest import FORMAT, Manifest, crc64nvme, crc_text, save_id_of, sign
from hyperpod_ext.runtime.snapshot.tree import take_apart
from hyperpod_ext.runtime.storage import inventory as survey_module
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.inventory import take_inventory
from hyperpod_ext.runtime.storage.names import folder_of
from hyperpod_ext.runtime.storage.object_store import ObjectStore
from hyperpod_ext.runtime.storage.open import open_store
from hyperpod_ext.runtime.storage.upload_split import partition_uploads

JOB = "tiny-gpt"
SECRET = b"0123456789abcdef"
MANY = 1_000


def state_of(rank: int, step: int) -> dict[str, Any]:
    model = {"weight": torch.arange(MANY).float() + step, "bias": torch.zeros(3, dtype=torch.bfloat16)}
    return {"model": model, "own": {f"of{rank}": torch.full((7,), rank)}, "lr": 0.5, "step": step}


class Written:
    """A place of checkpoints, written as the nodes of a job write it."""

    def __init__(self, store: ObjectStore, job: str = JOB, nodes: int = 2) -> None:
        self.store, self.job, self.nodes = store, job, nodes
        self.checkpoints = Checkpoints(store, job=job, secret=SECRET)

    def save(self, step: int, generation: int = 1, nodes: Sequence[int] | None = None, done: bool = True) -> str:
        """One rank a node; the manifest only if all `nodes` are there and done."""
        folder, manifests, images = folder_of(step, generation), {}, {}
        for rank in range(self.nodes) if nodes is None else nodes:
            layout = Layout(take_apart(state_of(rank, step), torch.Tensor))
            images[rank] = bytearray(layout.plan.nbytes)
            layout.write_frames(memoryview(images[rank]))
            for source, destination in zip(layout.locals, views(layout.plan, images[rank]), strict=True):
                destination.copy_(source)
            manifests[rank] = self._manifest(layout, images[rank], rank, step, generation)
            self.checkpoints.put_plan(folder, layout.plan)
            self.checkpoints.put_record(folder, rank, [manifests[rank]])
        files, _ = partition_uploads({rank: [manifest] for rank, manifest in manifests.items()})
        macs = {files[rank]: self.checkpoints.mac(memoryview(image)) for rank, image in images.items()}
        for rank, image in images.items():
            self.store.put(f"{folder}/{files[rank]}", memoryview(image), manifests[rank]["crc64nvme"])
            if done:
                self.checkpoints.put_done(folder, rank, {})
        if len(manifests) == self.nodes and done:
            assert self.checkpoints.commit(folder, manifests, files, macs)
        return folder

    def _manifest(self, layout: Layout, image: bytearray, rank: int, step: int, generation: int) -> Manifest:
        parts = take_apart(state_of(rank, step), torch.Tensor)
        record = {"format": FORMAT, "job": self.job, "rank": rank, "world_size": self.nodes, "step": step}
        record |= {"generation": generation, "save_id": save_id_of(generation, step), "plan": layout.plan.digest}
        content = {"nbytes": len(image), "crc64nvme": crc_text(crc64nvme(image)), "values": parts.values, "extras": {}}
        return sign(record | content, SECRET)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt" / JOB


@pytest.fixture
def written(folder: Path) -> Written:
    return Written(open_store(str(folder)))


def flip(file: Path, at: int = 2000) -> None:
    data = bytearray(file.read_bytes())
    data[at % len(data)] ^= 1
    file.write_bytes(data)


def states(folder: Path, *more: str) -> dict[int, str]:
    places = hp_ext("checkpoints", "list", folder, "-o", "json", *more).json["places"]
    return {one["step"]: one["state"] for place in places for one in place["checkpoints"]}


# --- list -------------------------------------------------------------------------------------------


def test_a_list_tells_the_state_of_each_newest_first(written: Written, folder: Path) -> None:
    written.checkpoints.fence(2, 30, "run")
    for step in (10, 20, 30, 40):
        written.save(step)
    written.save(35, generation=2)
    written.save(50, generation=2, nodes=[0])
    (folder / folder_of(20, 1) / "__1_0.distcp").unlink()
    (folder / folder_of(10, 1) / "manifest.json").write_text("{")
    done = hp_ext("checkpoints", "list", folder)
    assert done.code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["STEP", "GENERATION", "RANKS", "SIZE", "AGE", "TIER", "STATE"]
    assert [line.split()[0] for line in lines[1:]] == ["50", "40", "35", "30", "20", "10"]
    assert lines[1].endswith("file  unfinished: upload not started on node 1")
    assert "file  abandoned: a later generation began" in lines[2]
    assert lines[3].endswith("file  complete")
    assert lines[4].endswith("file  complete")
    assert lines[5].endswith("file  damaged: __1_0.distcp: is missing")
    assert "file  damaged: manifest.json: not JSON" in lines[6]


def test_the_keys_for_scripts_are_stable(written: Written, folder: Path) -> None:
    written.save(10)
    (place,) = hp_ext("checkpoints", "list", folder, "-o", "json").json["places"]
    assert set(place) == {"tier", "url", "job", "error", "damaged_claims", "checkpoints"}
    (one,) = place["checkpoints"]
    assert set(one) == {
        *("step", "generation", "folder", "state", "detail"),
        *("ranks", "nbytes", "created_at", "kept"),
    }
    assert (one["step"], one["state"], one["ranks"], one["kept"]) == (10, "complete", 2, None)
    assert one["nbytes"] == sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


HARMED_CLAIMS = {
    "cut off": lambda claim: claim[: len(claim) // 2],
    "empty": lambda claim: b"",
    "changed": lambda claim: claim.replace(b'"step":30', b'"step":"30"'),
    "of another generation": lambda claim: claim.replace(b'"generation":2', b'"generation":3'),
}


@pytest.mark.parametrize("harm", HARMED_CLAIMS)
def test_a_damaged_claim_is_told_beside_what_is_good(written: Written, folder: Path, tmp_path: Path, harm: str) -> None:
    """Which steps of generation 1 generation 2 gave up is not known; its own are as good as they were."""
    written.checkpoints.fence(2, 30, "run")
    for step in (30, 40):
        written.save(step)
    written.save(35, generation=2)
    claim = folder / "generations" / "000002.json"
    claim.write_bytes(HARMED_CLAIMS[harm](claim.read_bytes()))
    listed = hp_ext("checkpoints", "list", folder)
    assert listed.code == 0
    lines = listed.stdout.splitlines()[1:]
    assert [(line.split()[0], "complete" in line, "uncertain" in line) for line in lines] == [
        ("40", False, True),
        ("35", True, False),
        ("30", False, True),
    ]
    assert "uncertain: generation 2 may have abandoned it: the generation's claim file is damaged" in lines[0]
    assert "generations/000002.json" in listed.stderr
    assert "Restore that file from a backup" in listed.stderr
    (place,) = hp_ext("checkpoints", "list", folder, "-o", "json").json["places"]
    (told,) = place["damaged_claims"]
    assert (told["generation"], place["error"]) == (2, None)
    assert told["url"].endswith("/generations/000002.json")
    assert "it is unknown which steps generation 2 abandoned" in told["message"]
    # what reads everything says it with its exit code, and what must choose for itself chooses nothing
    verified = hp_ext("checkpoints", "verify", folder, "--all", "-o", "json")
    assert verified.code == 7
    assert {one["state"] for one in verified.json["checkpoints"]} == {"good"}
    assert verified.json["damaged_claims"] == [told]
    for command in (["show", folder], ["copy", folder, tmp_path / JOB], ["prune", folder, "--keep", "1", "--yes"]):
        refused = hp_ext("checkpoints", *command)
        assert (refused.code, "generations/000002.json" in refused.stderr) == (7, True), command
    assert not (tmp_path / JOB).exists()
    assert states(folder) == {40: "uncertain", 35: "complete", 30: "uncertain"}
    # who names a step knows which
    assert hp_ext("checkpoints", "show", folder, "--step", "40").code == 0
    assert hp_ext("checkpoints", "copy", folder, tmp_path / JOB, "--step", "30").code == 0
    assert states(tmp_path / JOB) == {30: "complete"}


def test_an_unfinished_checkpoint_names_the_nodes_it_waits_for(tmp_path: Path) -> None:
    written = Written(open_store(str(tmp_path / JOB)), nodes=4)
    written.save(10, nodes=[0], done=False)
    assert (
        "unfinished: upload not started on nodes 1, 2, 3, upload not finished on node 0"
        in hp_ext("checkpoints", "list", tmp_path / JOB).stdout
    )


def test_a_spec_lists_all_its_durable_tiers_and_what_they_keep(written: Written, folder: Path, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        written.save(step)
    (tmp_path / "train.py").touch()
    spec = tmp_path / "job.yaml"
    tier = f"{{kind: file, path: {folder.parent}, keep: 1, keep_steps: [10]}}"
    spec.write_text(f"name: {JOB}\nscript: train.py\ncheckpoint:\n  tiers: [{{kind: memory}}, {tier}]\n")
    done = hp_ext("checkpoints", "list", "-f", spec, "-o", "json").json
    kept = {one["step"]: one["kept"] for one in done["places"][0]["checkpoints"]}
    assert kept == {30: True, 20: False, 10: True}
    assert "KEPT" in hp_ext("checkpoints", "list", "-f", spec).stdout
    assert "none yet" in hp_ext("checkpoints", "list", "-f", spec, "--set", "name=other").stdout
    done = hp_ext("checkpoints", "list", "-f", spec, "--set", "checkpoint.tiers=[{kind: memory}]")
    assert (done.code, done.stdout) == (0, "the job has no durable tier and no snapshot in memory\n")


@pytest.mark.parametrize(
    ("place", "code", "text"),
    [
        ("ckpt", 6, "did you mean {ckpt}/tiny-gpt?"),
        ("ckpt/tiny-gpt/step-000000010-g000001", 6, "hint: write {ckpt}/tiny-gpt\n"),
        ("ckpt/tiny-gpz", 6, "did you mean {ckpt}/tiny-gpt?"),
        ("nowhere/at/all", 6, "there are no checkpoints in"),
    ],
)
def test_a_wrong_place_says_which_may_be_meant(
    written: Written, tmp_path: Path, place: str, code: int, text: str
) -> None:
    written.save(10)
    done = hp_ext("checkpoints", "list", tmp_path / place)
    assert (done.code, done.stdout) == (code, "")
    assert text.format(ckpt=tmp_path / "ckpt") in done.stderr


def test_other_wrong_places(place: LocalPlace) -> None:
    done = hp_ext("checkpoints", "list", "no-such-job")
    assert (done.code, done.stdout) == (6, "")
    assert "neither a local job nor a folder" in done.stderr
    assert hp_ext("checkpoints", "list", "http://example.com/x").code == 3
    assert hp_ext("checkpoints", "list").code == 2


def test_the_memory_of_a_running_local_job_is_listed(place: LocalPlace, folder: Path) -> None:
    tiers = [{"kind": "memory"}, {"kind": "file", "path": str(folder.parent), "every_steps": 5}]
    policy = CheckpointPolicy.model_validate_json(json.dumps({"tiers": tiers}))
    memory = NodeMemory(policy, job=JOB, secret=SECRET, node=0, nodes=1, owners=2, usable_bytes=lambda: 1 << 30)
    with local_store.locked(JOB):
        submission = local_store.create(JOB)
        submission.write_status(state="running", scratch=str(place.scratch))
        submission.job_file.write_text(
            json.dumps({"name": JOB, "script": "train.py", "nodes": 2, "checkpoint": {"tiers": tiers}})
        )
        path = place.scratch / "node0.memory"
        config = RuntimeConfig(name=JOB, nodes=2, workers_per_node=2, checkpoint=policy)
        threading.Thread(target=Server(path, memory, config).serve, daemon=True).start()
        waiting.until(lambda: answers(path))
        assert hp_ext("checkpoints", "list", JOB).code == 0, "before the first snapshot"
        for rank in range(2):
            fill(path, rank, step=7)
        memory.own.mark(1, save_id_of(1, 7), State.REPLICATED)
        table = hp_ext("checkpoints", "list", JOB)
        found = hp_ext("checkpoints", "list", JOB, "-o", "json")
    _, row, *rest = table.stdout.splitlines()
    assert row.split()[:3] == ["7", "1", "2/2"]
    assert row.endswith("memory  sealed (rank 0), replicated (rank 1)")
    assert f"{folder}: none yet" in rest
    assert [line.split()[:3] for line in rest if line.startswith("0 ")] == [["0", str(folder), "-"]]
    assert "node 1: its memory server is not up yet" in rest
    first, second = found.json["memory"]["nodes"]
    assert [(one["rank"], one["step"], one["state"]) for one in first["snapshots"]] == [
        (0, 7, "sealed"),
        (1, 7, "replicated"),
    ]
    assert second["error"] == "its memory server is not up yet"
    assert "is not running" in hp_ext("checkpoints", "list", JOB).stderr


def fill(path: Path, rank: int, step: int) -> None:
    """Save as a worker does."""
    layout = Layout(take_apart(state_of(rank, step), torch.Tensor))
    client = MemoryClient(str(path))
    client.map(rank, layout.plan.nbytes)
    client.add_plan(layout.plan)
    save_id = save_id_of(1, step)
    slot = client.begin(rank, step, save_id, 1)
    assert slot is not None
    record = {"save_id": save_id, "world_size": 2, "own_digest": "", "extras": {}, "values": [0.5, step]}
    client.seal(rank, slot, record | {"plan": layout.plan.digest, "nbytes": layout.plan.nbytes, "saved_at": 1.0})
    client.flush()
    client.close()


def test_a_local_jobs_checkpoints_are_checked_with_its_own_secret(
    written: Written, folder: Path, place: LocalPlace
) -> None:
    written.save(10)
    with local_store.locked(JOB):
        submission = local_store.create(JOB)
    tiers = [{"kind": "file", "path": str(folder.parent)}]
    submission.job_file.write_text(
        json.dumps({"name": JOB, "script": "train.py", "nodes": 2, "checkpoint": {"tiers": tiers}})
    )
    secret = submission.folder.parent / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    done = hp_ext("checkpoints", "verify", JOB, "-o", "json")
    assert (done.code, done.json["checkpoints"][0]["signature"]) == (0, "checked")
    secret.write_bytes(SECRET[::-1])
    assert hp_ext("checkpoints", "verify", JOB).code == 7


# --- show -------------------------------------------------------------------------------------------


def test_show_tells_what_a_checkpoint_holds(written: Written, folder: Path) -> None:
    written.save(10)
    written.save(20)
    text = hp_ext("checkpoints", "show", folder).stdout
    assert text.startswith("step 20, generation 1 of tiny-gpt: complete\n")
    assert "model         2 tensors, 1,003 elements (1 float32, 1 bfloat16)" in text
    assert "own           2 tensors, 14 elements (int64)" in text
    assert f'checkpoint_id="{folder}/step-000000020-g000001"' in text
    (one,) = hp_ext("checkpoints", "show", folder, "--step", 10, "-o", "json").json["checkpoints"]
    assert (one["step"], one["world_size"], one["signature"], one["plain_values"]) == (10, 2, "not checked", 2)
    assert [rank["file"] for rank in one["ranks"]] == ["__0_0.distcp", "__1_0.distcp"]
    assert one["holds"]["model"] == {"tensors": 2, "elements": 1003, "dtypes": {"float32": 1, "bfloat16": 1}}


def test_a_step_that_is_not_there_comes_with_the_nearest(written: Written, folder: Path) -> None:
    for step in (10, 20, 30):
        written.save(step)
    written.save(40, nodes=[0])
    done = hp_ext("checkpoints", "show", folder, "--step", "24")
    assert (done.code, done.stdout) == (6, "")
    assert "the nearest steps: 20 and 30" in done.stderr
    done = hp_ext("checkpoints", "verify", folder, "--step", "40")
    assert done.code == 6
    assert "step 40" in done.stderr
    assert "is unfinished: upload not started on node 1" in done.stderr


# --- verify -----------------------------------------------------------------------------------------


def test_a_good_checkpoint_is_good_with_and_without_the_secret(written: Written, folder: Path, tmp_path: Path) -> None:
    written.save(10)
    done = hp_ext("checkpoints", "verify", folder)
    assert done.code == 0
    assert "good" in done.stdout
    assert "signatures and MACs were not checked" in done.stderr
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    done = hp_ext("checkpoints", "verify", folder, "--secret-file", secret, "-o", "json")
    assert (done.code, done.json["checkpoints"][0]["signature"]) == (0, "checked")
    secret.write_bytes(b"another secret of another job")
    done = hp_ext("checkpoints", "verify", folder, "--secret-file", secret)
    assert done.code == 7
    assert "not signed with this job's secret" in done.stdout
    secret.chmod(0o644)
    assert hp_ext("checkpoints", "verify", folder, "--secret-file", secret).code == 1


@pytest.mark.parametrize("target", ["__0_0.distcp", "__1_0.distcp", "__0_1.distcp", ".metadata", "plan"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "remove"])
def test_harm_to_any_file_is_found(written: Written, folder: Path, target: str, harm: str) -> None:
    inside = folder / written.save(10)
    file = next(inside.glob("plan-*")) if target == "plan" else inside / target
    match harm:
        case "flip":
            flip(file)
        case "truncate":
            file.write_bytes(file.read_bytes()[:-1])
        case "empty":
            file.write_bytes(b"")
        case "remove":
            file.unlink()
    done = hp_ext("checkpoints", "verify", folder, "-o", "json")
    assert done.code == 7
    (one,) = done.json["checkpoints"]
    assert one["state"] == "damaged"
    assert {problem["file"] for problem in one["problems"]} == {file.name}


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    secret = tmp_path / "the secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    return secret


@pytest.mark.parametrize("target", ["__1_0.distcp", "__0_1.distcp", ".metadata"])
def test_a_forged_file_with_the_right_crc_is_found_by_who_has_the_secret(
    written: Written, folder: Path, tmp_path: Path, secret_file: Path, target: str
) -> None:
    file = folder / written.save(10) / target
    file.write_bytes(forge(file.read_bytes(), 100, b"\xff\xfe", 120))
    assert hp_ext("checkpoints", "verify", folder).code == 0, "no damage"
    done = hp_ext("checkpoints", "verify", folder, "--secret-file", secret_file)
    assert done.code == 7
    assert "step-000000010-g000001: DAMAGED" in done.stdout
    assert f"  {target}: its CRC64-NVME is right, but not its MAC: somebody has changed it" in done.stdout
    done = hp_ext("checkpoints", "copy", folder, tmp_path / "there" / JOB, "--secret-file", secret_file)
    assert done.code == 7
    assert f"{target}: its CRC64-NVME is right, but not its MAC" in done.stderr
    assert not list((tmp_path / "there").rglob("manifest.json"))
    assert hp_ext("checkpoints", "list", folder, "--secret-file", secret_file).code == 0  # looks at manifests alone


def test_what_lies_where_a_copy_goes_is_not_taken_for_it_by_its_crc(
    written: Written, folder: Path, tmp_path: Path, secret_file: Path
) -> None:
    inside = written.save(10)
    there = tmp_path / "there" / JOB / inside
    there.mkdir(parents=True)
    (there / "__1_0.distcp").write_bytes(forge((folder / inside / "__1_0.distcp").read_bytes(), 100, b"\xff", 120))
    assert hp_ext("checkpoints", "copy", folder, there.parent, "--secret-file", secret_file).code == 0
    assert (there / "__1_0.distcp").read_bytes() == (folder / inside / "__1_0.distcp").read_bytes()


def test_a_checkpoint_without_macs_is_told_wherever_it_is_looked_at(
    written: Written, folder: Path, secret_file: Path
) -> None:
    manifest = folder / written.save(10) / "manifest.json"
    document = json.loads(manifest.read_text())
    del document["macs"]
    manifest.write_text(json.dumps(sign(document, SECRET)))
    done = hp_ext("checkpoints", "verify", folder, "--secret-file", secret_file, "-o", "json")
    assert (done.code, done.json["checkpoints"][0]["macs"]) == (0, "none")
    assert "step 10: an earlier version of hyperpod_ext wrote it, with no MAC of its files" in done.stderr
    assert "complete: no MAC of its files" in hp_ext("checkpoints", "list", folder).stdout
    assert "complete (no MAC of its files" in hp_ext("checkpoints", "show", folder).stdout


@pytest.mark.parametrize("mac", [None, 7, {}, {"kind": "crc"}, {"kind": "aes-256-gmac", "salt": "00", "tag": "00"}])
def test_a_mac_that_is_none_is_damage(written: Written, folder: Path, secret_file: Path, mac: object) -> None:
    manifest = folder / written.save(10) / "manifest.json"
    document = json.loads(manifest.read_text())
    document["macs"]["__1_0.distcp"] = mac
    manifest.write_text(json.dumps(sign(document, SECRET)))
    done = hp_ext("checkpoints", "verify", folder, "--secret-file", secret_file)
    assert done.code == 7
    assert "manifest.json: its MAC of '__1_0.distcp' is " in done.stdout


@pytest.mark.parametrize(("harm", "said"), [("flip", "differs from the manifest"), ("remove", "is missing")])
def test_what_earlier_versions_did_not_sum_is_compared_all_the_same(
    written: Written, folder: Path, harm: str, said: str
) -> None:
    inside = folder / written.save(10)
    manifest = json.loads((inside / "manifest.json").read_text())
    del manifest["derived"]
    (inside / "manifest.json").write_text(json.dumps(sign(manifest, SECRET)))
    assert hp_ext("checkpoints", "verify", folder).code == 0
    flip(inside / ".metadata", 200) if harm == "flip" else (inside / ".metadata").unlink()
    done = hp_ext("checkpoints", "verify", folder)
    assert done.code == 7
    assert f"  .metadata: {said}" in done.stdout


def test_all_that_is_wrong_is_told(written: Written, folder: Path) -> None:
    for step in (10, 20, 30):
        written.save(step)
    flip(folder / folder_of(10, 1) / "__0_0.distcp")
    flip(folder / folder_of(10, 1) / "__1_0.distcp")
    (folder / folder_of(20, 1) / ".metadata").unlink()
    written.save(40, nodes=[0])
    done = hp_ext("checkpoints", "verify", folder, "--all")
    assert done.code == 7
    assert done.stdout.count("CRC64-NVME is") == 2
    assert "  .metadata: is missing" in done.stdout
    assert "step-000000030-g000001: good" in done.stdout
    assert "step 40: skipped, because it is unfinished" in done.stderr
    assert hp_ext("checkpoints", "verify", folder).code == 0, "the newest is good"


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"format": FORMAT},
        {"format": 99},
        {"ranks": {"0": {}}},
        {"ranks": 7},
        {"files": {"0": "../../secret", "1": "/etc/passwd"}},
        {"files": {}},
        {"world_size": "many"},
        {"step": 11},
        {"derived": 3},
        {"derived": {".metadata": 3}},
        {"created_at": "now"},
    ],
)
def test_a_manifest_that_makes_no_sense_is_damage_not_a_traceback(
    written: Written, folder: Path, document: Any
) -> None:
    file = folder / written.save(10) / "manifest.json"
    whole = json.loads(file.read_text())
    if document == {"format": FORMAT}:
        whole = {"job": JOB}
    file.write_text(json.dumps(whole | document if isinstance(document, dict) else document))
    assert states(folder)[10] in ("damaged", "foreign")
    done = hp_ext("checkpoints", "verify", folder, "--step", 10)
    assert (done.code, "DAMAGED" in done.stdout) == (7, True)
    assert hp_ext("checkpoints", "show", folder, "--step", 10).code == 7


def test_one_that_retention_deletes_meanwhile_is_not_called_damaged(
    written: Written, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        written.save(step)
    read_into = type(written.store).read_into

    def delete_first(store: Any, name: str, *arguments: Any, **more: Any) -> None:
        if name.startswith(folder_of(10, 1)):
            written.checkpoints.prune(1, None, ())
        read_into(store, name, *arguments, **more)

    monkeypatch.setattr(type(written.store), "read_into", delete_first)
    done = hp_ext("checkpoints", "verify", folder, "--all")
    assert (done.code, "step-000000020" in done.stdout, "step-000000010" in done.stdout) == (0, True, False)
    assert "was deleted while it was read" in done.stderr


def test_another_jobs_checkpoint_is_told_and_left_alone(written: Written, folder: Path) -> None:
    for step in (20, 30):
        written.save(step)
    Written(written.store, job="other").save(10)
    assert states(folder) == {30: "complete", 20: "complete", 10: "foreign"}
    assert "belongs to job 'other', not to 'tiny-gpt'" in hp_ext("checkpoints", "verify", folder, "--all").stdout
    gone = hp_ext("checkpoints", "prune", folder, "--keep", 1, "--yes", "--damaged", "-o", "json").json["deleted"]
    assert [one["step"] for one in gone] == [20]


def test_verifying_needs_no_more_memory_than_its_pieces(
    written: Written, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.save(10)
    largest: list[int] = []
    read_into = type(written.store).read_into

    def count(store: Any, name: str, destination: memoryview, offset: int = 0, **more: Any) -> None:
        largest.append(len(destination))
        read_into(store, name, destination, offset, **more)

    monkeypatch.setattr(type(written.store), "read_into", count)
    monkeypatch.setattr("hyperpod_ext.runtime.storage.verify.CHUNK", 1000)
    assert hp_ext("checkpoints", "verify", folder).code == 0
    assert max(largest) == 1000
    assert len(largest) > 8


# --- copy -------------------------------------------------------------------------------------------


def test_a_copy_is_byte_for_byte_and_plain_torch_loads_it(written: Written, folder: Path, tmp_path: Path) -> None:
    inside = written.save(10)
    to = tmp_path / "backup" / JOB
    done = hp_ext("checkpoints", "copy", folder, to)
    assert done.code == 0
    assert {file.name: file.read_bytes() for file in (to / inside).iterdir()} == {
        file.name: file.read_bytes() for file in (folder / inside).iterdir()
    }
    state = {"model": {"weight": torch.zeros(MANY), "bias": torch.ones(3, dtype=torch.bfloat16)}}
    dcp.load(state, checkpoint_id=str(to / inside))
    assert torch.equal(state["model"]["weight"], state_of(0, 10)["model"]["weight"])
    assert "existed already" in hp_ext("checkpoints", "copy", folder, to).stdout
    assert hp_ext("checkpoints", "copy", folder, folder).code == 2


def test_a_copy_goes_on_where_it_was_cut_and_mends_what_is_spoilt(
    written: Written, folder: Path, tmp_path: Path
) -> None:
    inside = written.save(10)
    to = tmp_path / "backup"
    assert hp_ext("checkpoints", "copy", folder, to, "--all").code == 0
    (to / inside / "manifest.json").unlink()
    (to / inside / "__0_0.distcp").unlink()
    flip(to / inside / "__1_0.distcp")
    done = hp_ext("checkpoints", "copy", folder, to, "-o", "json")
    (one,) = done.json["copied"]
    assert one["files_already_there"] == 2, "what is there for dcp.load"
    assert hp_ext("checkpoints", "verify", to).code == 0
    assert "only in a folder of its own name, tiny-gpt" in hp_ext("checkpoints", "copy", folder, to).stderr


def test_a_damaged_source_never_becomes_a_copy_that_counts(written: Written, folder: Path, tmp_path: Path) -> None:
    inside = written.save(10)
    flip(folder / inside / "__1_0.distcp")
    to = tmp_path / JOB
    done = hp_ext("checkpoints", "copy", folder, to)
    assert done.code == 7
    assert "__1_0.distcp: CRC64-NVME is" in done.stderr
    assert states(to) == {10: "unfinished"}
    (folder / inside / "__1_0.distcp").unlink()
    assert hp_ext("checkpoints", "copy", folder, to).code == 7


def test_a_place_that_takes_nothing_is_told_with_its_name(written: Written, folder: Path) -> None:
    written.save(10)
    done = hp_ext("checkpoints", "copy", folder, "/proc/nothing")  # where nobody, not even root, makes a folder
    assert done.code == 4
    assert done.stderr.startswith("error: Cannot write /proc/nothing/step-000000010")


def test_another_checkpoint_of_the_same_step_is_not_overwritten(written: Written, folder: Path, tmp_path: Path) -> None:
    inside = written.save(10)
    other = Written(open_store(str(tmp_path / "other" / JOB)), nodes=1)
    other.save(10)
    before = (tmp_path / "other" / JOB / inside / "manifest.json").read_bytes()
    done = hp_ext("checkpoints", "copy", folder, tmp_path / "other" / JOB)
    assert done.code == 5
    assert "is another checkpoint of step 10" in done.stderr
    assert (tmp_path / "other" / JOB / inside / "manifest.json").read_bytes() == before
    busy = Written(open_store(str(tmp_path / "busy" / JOB)))
    busy.save(10, nodes=[0])
    assert "is being written by a job" in hp_ext("checkpoints", "copy", folder, tmp_path / "busy" / JOB).stderr
    moved_on = Written(open_store(str(tmp_path / "on" / JOB)))
    moved_on.checkpoints.fence(3, 5, "run")
    moved_on.save(1, generation=1)
    moved_on.save(6, generation=3)
    done = hp_ext("checkpoints", "copy", folder, tmp_path / "on" / JOB)
    assert "generation 3 of the job there continued from step 5" in done.stderr


def test_large_images_go_through_a_file(
    written: Written, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.save(10)
    monkeypatch.setattr("hyperpod_ext.runtime.storage.copy._IN_MEMORY", 100)
    assert hp_ext("checkpoints", "copy", folder, tmp_path / JOB).code == 0
    assert hp_ext("checkpoints", "verify", tmp_path / JOB).code == 0


# --- prune ------------------------------------------------------------------------------------------


def test_prune_deletes_what_it_said(written: Written, folder: Path) -> None:
    for step in (10, 20, 30, 40):
        written.save(step)
    written.save(15, nodes=[0])
    options = ("--keep", "1", "--keep-every", "20", "--keep-step", "10")
    done = hp_ext("checkpoints", "prune", folder, *options, "--dry-run")
    assert done.stdout.splitlines()[-1].startswith("2 checkpoints, ")
    assert len(states(folder)) == 5
    done = hp_ext("checkpoints", "prune", folder, *options, "--yes", "-o", "json")
    assert [one["step"] for one in done.json["deleted"]] == [30, 15]
    assert states(folder) == {40: "complete", 20: "complete", 10: "complete"}
    assert hp_ext("checkpoints", "prune", folder, "--keep", "3", "--yes").stdout == "nothing to delete\n"


def test_the_newest_good_one_stays_though_damaged_ones_came_after_it(written: Written, folder: Path) -> None:
    for step in (5, 10, 20, 30):
        written.save(step)
    (folder / folder_of(20, 1) / "manifest.json").write_text("")
    (folder / folder_of(30, 1) / ".metadata").unlink()
    done = hp_ext("checkpoints", "prune", folder, "--keep", "1", "--damaged", "--yes", "-o", "json")
    assert [one["step"] for one in done.json["deleted"]] == [5]
    assert states(folder) == {30: "damaged", 20: "damaged", 10: "complete"}
    flip(folder / folder_of(10, 1) / "__0_0.distcp")
    written.save(7)
    done = hp_ext("checkpoints", "prune", folder, "--keep", "1", "--verify", "--yes")
    assert done.code == 7
    assert "nothing was deleted" in done.stderr
    assert 7 in states(folder)


def test_damaged_ones_stay_unless_named(written: Written, folder: Path) -> None:
    for step in (10, 20, 30):
        written.save(step)
    for step in (10, 20):
        (folder / folder_of(step, 1) / ".metadata").unlink()
    found = take_inventory(written.store, secret=SECRET)
    assert survey_module.select_prunable(found, 1, None, ()) == []
    gone = survey_module.select_prunable(found, 1, None, [20], with_damaged=True)
    assert [one.found.step for one in gone] == [10]


def test_prune_asks_or_is_told(written: Written, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        written.save(step)
    assert hp_ext("checkpoints", "prune", folder).code == 2
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: PTH123, SIM115
    done = hp_ext("checkpoints", "prune", folder, "--keep", "1")
    assert (done.code, len(states(folder))) == (2, 2)
    assert "Use --yes" in done.stderr


# --- help and S3 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["list", "show", "verify", "copy", "prune"])
def test_every_subcommand_has_an_example_in_its_help(command: str) -> None:
    assert f"  hp-ext checkpoints {command}" in hp_ext("checkpoints", command, "--help").stdout.partition("Example")[2]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> str:
    url = s3_server.endpoint()
    for name, value in {**s3_server.CREDENTIALS, "AWS_ENDPOINT_URL_S3": url}.items():
        monkeypatch.setenv(name, value)
    return s3_server.new_bucket(url)


@pytest.mark.slow
def test_from_a_directory_to_s3_and_back(written: Written, folder: Path, bucket: str, tmp_path: Path) -> None:
    for step in (10, 20):
        written.save(step)
    there = f"s3://{bucket}/jobs/{JOB}"
    assert hp_ext("checkpoints", "copy", folder, there, "--all").code == 0
    assert hp_ext("checkpoints", "verify", there, "--all").code == 0
    assert "hp-ext checkpoints copy" in hp_ext("checkpoints", "show", there).stdout
    assert f"did you mean {there}?" in hp_ext("checkpoints", "list", f"s3://{bucket}/jobs").stderr
    assert f"did you mean {there}?" in hp_ext("checkpoints", "list", f"s3://{bucket}/jobs/tiny").stderr
    assert hp_ext("checkpoints", "copy", there, tmp_path / JOB, "--step", "10").code == 0
    assert hp_ext("checkpoints", "verify", tmp_path / JOB).code == 0
    client = s3_server.client(s3_server.endpoint())
    client.put_object(Bucket=bucket, Key=f"jobs/{JOB}/{folder_of(20, 1)}/__1_0.distcp", Body=b"")
    done = hp_ext("checkpoints", "verify", there, "--all")
    assert (done.code, "has 0 bytes, but the manifest lists" in done.stdout) == (7, True)
    assert hp_ext("checkpoints", "prune", there, "--keep", "1", "--yes").stdout == "nothing to delete\n"
    done = hp_ext("checkpoints", "list", "s3://no-such-bucket-here/x")
    assert (done.code, "Create bucket" in done.stderr) == (4, True)


@pytest.mark.slow
def test_a_forged_shard_on_s3_is_found_by_who_has_the_secret(bucket: str, secret_file: Path) -> None:
    """S3 itself is asked to check its CRC64, and finds it right."""
    place = f"s3://{bucket}/jobs/{JOB}"
    there = Written(open_store(place))
    name = f"{there.save(10)}/__1_0.distcp"
    before, client = there.store.get(name), s3_server.client(s3_server.endpoint())
    where = {"Bucket": bucket, "Key": f"jobs/{JOB}/{name}"}
    known = client.head_object(**where, ChecksumMode="ENABLED")["ChecksumCRC64NVME"]
    client.put_object(**where, Body=forge(before, 100, b"\xff\xfe", 120), ChecksumCRC64NVME=known)
    assert hp_ext("checkpoints", "verify", place).code == 0, "no damage"
    done = hp_ext("checkpoints", "verify", place, "--secret-file", secret_file)
    assert done.code == 7
    assert f"{place}/step-000000010-g000001: DAMAGED" in done.stdout
    assert "  __1_0.distcp: its CRC64-NVME is right, but not its MAC" in done.stdout


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        (["checkpoints", "verify", "s3://bucket/prefix/a"], "runtime,s3"),
        (["checkpoints", "copy", "a", "s3://bucket/prefix"], "runtime,s3"),
        (["checkpoints", "verify", "a"], "runtime"),
        (["data", "build", "a.parquet"], "runtime,arrow"),
    ],
)
def test_all_missing_packages_are_named_at_once(
    words: list[str], extras: str, place: LocalPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    done = hp_ext(*words)
    assert (done.code, done.stderr.splitlines()[-1]) == (1, f"hint: pip install 'hyperpod-ext[{extras}]'")
