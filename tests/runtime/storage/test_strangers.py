"""Names, claims, notes and manifests by somebody who can write to a tier and lacks the job's secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hostile_tree import JOB, SECRET, manifest_of, save

from hyperpod_ext.errors import CorruptSnapshotError, StaleGenerationError
from hyperpod_ext.runtime.snapshot import manifest as manifests
from hyperpod_ext.runtime.snapshot.manifest import (
    LIGHT_BYTES,
    is_light,
    is_signed_text,
    read_document,
    sign,
    signed_text,
)
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.file import FileStore
from hyperpod_ext.runtime.storage.inventory import take_inventory
from hyperpod_ext.runtime.storage.names import Found, fenced_generations, folder_of, parse_file, parse_folder


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(FileStore(tmp_path / JOB), job=JOB, secret=SECRET)


def write(tmp_path: Path, name: str, data: bytes = b"x") -> Path:
    file = tmp_path / JOB / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "step-000000001-g9223372036854775807",
        "step-9999999999999999-g000001",
        "step-0000000001-g000001",
        "step-000000001-g0000001",
        "step-00000000\u0661-g000001",
        "step-000000001-g000001x",
        "step-1-g1",
    ],
)
def test_a_name_that_we_do_not_write_is_no_checkpoints(name: str) -> None:
    assert parse_folder(name) is None
    assert parse_file(f"{name}/manifest.json") is None


def test_the_names_that_we_write_are_read() -> None:
    for found in (Found(0, 1), Found(10**14, 10**8), Found(7, 999_999)):
        assert parse_folder(found.folder) == found
        for file in ("manifest.json", ".metadata", "__17_0.distcp", f"plan-{'a' * 32}.json", "left-3.json"):
            assert parse_file(f"{found.folder}/{file}") == (found, file)
    for file in ("thesis.tex", "sub/manifest.json", ".x.partial", "__a_0.distcp"):
        assert parse_file(f"{folder_of(1, 1)}/{file}") is None
    names = ["generations/000002.json", "generations/0000003.json", "generations/9999999999.json", "x/000004.json"]
    assert fenced_generations(names) == [2]


def test_retention_leaves_files_that_are_none_of_a_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for step in (10, 20):
        save(checkpoints, step)
    thesis = write(tmp_path, f"{folder_of(10, 1)}/thesis.tex")
    deep = write(tmp_path, f"{folder_of(10, 1)}/deep/manifest.json")
    assert checkpoints.prune(1, None, ()) == [folder_of(10, 1)]
    assert sorted(thesis.parent.rglob("*")) == [deep.parent, deep, thesis]
    assert checkpoints.prune(1, None, ()) == []


# --- generations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["generations/999999999.json", "step-000000001-g999999999/x", "step-000000001-g999999999/manifest.json"]
)
def test_a_generation_far_ahead_counts_only_with_a_signature(
    checkpoints: Checkpoints, tmp_path: Path, name: str
) -> None:
    save(checkpoints, 10)
    write(tmp_path, name)
    assert checkpoints.newest_generation() == 1
    checkpoints.fence(2, 10, "run")
    checkpoints.check_not_followed(1, "run")
    checkpoints.fence(50_000, 10, "run")
    assert checkpoints.newest_generation() == 50_000


def test_a_claim_that_the_job_has_not_signed_stops_nobody(checkpoints: Checkpoints, tmp_path: Path) -> None:
    save(checkpoints, 10)
    checkpoints.fence(1, 0, "run")
    write(tmp_path, "generations/000002.json", b'{"generation": 2, "step": 0, "run": "evil"}')
    write(tmp_path, f"{folder_of(1, 2)}/manifest.json", b"{}")
    checkpoints.check_not_followed(1, "run")
    assert [one for one in checkpoints.found() if one.generation == 1] == [Found(10, 1)]
    save(checkpoints, 20, 2)
    with pytest.raises(StaleGenerationError, match="generation 2 is damaged, so generation 1 no longer writes"):
        checkpoints.check_not_followed(1, "run")


def test_a_node_that_failed_must_have_said_so_itself(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = folder_of(10, 1)
    checkpoints.put_failed(folder, 0, attempt=3)
    assert checkpoints.attempt_of(folder, "failed", 0) == 3
    said = (tmp_path / JOB / folder / "failed-0.json").read_bytes()
    for kind, node, data in (("failed", 1, b'{"attempt": 7}'), ("left", 0, said), ("failed", 2, said)):
        write(tmp_path, f"{folder}/{kind}-{node}.json", data)
        assert checkpoints.attempt_of(folder, kind, node) == -1  # type: ignore[arg-type]
    assert checkpoints.progress(folder).failed == {0, 1, 2}, "names alone prove nothing"


# --- documents ------------------------------------------------------------------------------------


def test_a_document_is_proved_by_its_bytes_before_it_is_parsed() -> None:
    document = {"format": 1, "job": JOB, "ranks": {"0": manifest_of(0, 1, 5, 1, "0" * 16)}, "step": 5, "world_size": 1}
    text = signed_text(document, SECRET)

    def proved(data: bytes, secret: bytes = SECRET) -> bool:
        return is_signed_text(lambda start, end: data[start:end], len(data), secret)

    assert proved(text)
    assert json.loads(text) == sign(document, SECRET), "earlier versions read it, too"
    assert not proved(text, b"other")
    assert not proved(b"")
    assert not proved(json.dumps(sign(document, SECRET)).encode())
    for at in range(0, len(text), 7):
        assert not proved(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
    note = signed_text({"manifests": [document]}, SECRET)
    assert note.endswith(b'"}')
    assert proved(note)


@pytest.mark.parametrize(
    "data",
    [
        b"[" + b"[]," * (LIGHT_BYTES // 3) + b"[]]",
        b'{"a":"' + b"x" * LIGHT_BYTES + b'"}',
        b"[" + b"1," * 300_000 + b"1]",
    ],
    ids=["lists", "text", "numbers"],
)
def test_a_heavy_document_is_refused_before_it_is_parsed(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(manifests.json, "loads", lambda data: pytest.fail("it was parsed"))
    assert not is_light(data)
    write(tmp_path, f"{folder_of(10, 1)}/manifest.json", data)
    with pytest.raises(CorruptSnapshotError, match="is read only if the job has signed it"):
        checkpoints.read(Found(10, 1))
    with pytest.raises(CorruptSnapshotError, match="is read only if the job has signed it"):
        read_document(data, "here")
    (seen,) = take_inventory(checkpoints.store).seen
    assert (seen.state, "--secret-file" in seen.detail) == ("uncertain", True)


def test_a_heavy_document_of_the_job_is_read(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("snapshot.manifest", "storage.checkpoints"):
        monkeypatch.setattr(f"hyperpod_ext.runtime.{module}.LIGHT_BYTES", 500)
    save(checkpoints, 10)
    assert checkpoints.read(Found(10, 1))["step"] == 10
    (seen,) = take_inventory(checkpoints.store, job=JOB, secret=SECRET).seen
    assert seen.state == "complete"
    assert seen.read_manifest(checkpoints.store, SECRET)["step"] == 10


def test_a_file_of_a_terabyte_is_measured_and_not_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with write(tmp_path, f"{folder_of(10, 1)}/manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptSnapshotError, match="1099511627776 bytes"):
        checkpoints.read(Found(10, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 10**12},
        {"world_size": float("inf")},
        {"created_at": float("nan")},
        {"created_at": 10**400},
        {"nbytes": -1},
        {"ranks": {"0": []}},
        {"files": ["__0_0.distcp"]},
        {"macs": {"__0_0.distcp": {"kind": "aes-256-gmac"}}},
        {"derived": {"../../x": {"nbytes": 1e999, "crc64nvme": 1}}},
        {"job": ["j"]},
        {"format": 10**4000},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_made_up_manifest_is_damage_or_foreign_and_no_error_of_ours(
    checkpoints: Checkpoints, tmp_path: Path, change: dict[str, object]
) -> None:
    save(checkpoints, 10)
    file = tmp_path / JOB / folder_of(10, 1) / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
    for secret in (SECRET, None):
        (seen,) = take_inventory(checkpoints.store, job=JOB, secret=secret).seen
        assert seen.state in ("damaged", "foreign", "complete")
        assert seen.state != "complete" or secret is None
        assert len(seen.detail) < 500
        assert seen.created_at is None or 0 <= seen.created_at < 1e12


def test_json_that_is_nested_too_deep_is_damage(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Also at the very depth at which it is parsed, and cannot be written again to check its signature."""
    for depth in (*range(940, 1000, 3), 100_000):
        text = '{"format": 1, "job": "j", "a": ' + "[" * depth + "]" * depth + "}"
        write(tmp_path, f"{folder_of(10, 1)}/manifest.json", text.encode())
        with pytest.raises(CorruptSnapshotError):
            checkpoints.read(Found(10, 1))


def test_the_descriptors_of_folders_are_closed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    save(checkpoints, 10)
    (tmp_path / JOB / "link").symlink_to(tmp_path)
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(10):
        checkpoints.found()
        checkpoints.prune(1, None, ())
        with pytest.raises(CorruptSnapshotError):
            checkpoints.store.get(f"{folder_of(10, 1)}/manifest.json", 1)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
