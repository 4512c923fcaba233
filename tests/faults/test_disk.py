"""Tiers on the nodes' own disks: all processes of a job end, and it resumes from what each node has kept."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from command import hp_ext
from nodes import kill_node
from waiting import until

pytestmark = pytest.mark.slow

SHARDED_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"]
SHARDED = Path(__file__).parent / "sharded.py"
HELD_AT = 8
"""The step that rank 0 does not end: the newest on disk is 6."""


class Disks:
    """The disks of two nodes, and the secret that outlives a job."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.secret = folder / "disks", folder / "secret"
        self.secret.touch(mode=0o600)
        self.secret.write_text(secrets.token_hex(16))

    def settings(self, *more: dict[str, Any], **fields: Any) -> dict[str, Any]:
        disk = {"kind": "disk", "path": str(self.folder / "{node}"), "every_steps": 2, **fields}
        # else a node that is busy leaves out other steps than the next one
        return {"checkpoint": {"tiers": [{"kind": "memory"}, disk, *more], "when_busy": "wait"}}

    def of(self, node: int) -> Path:
        return self.folder / str(node) / "tiny"

    def has(self, step: int, nodes: Sequence[int] = (0, 1)) -> bool:
        """Whether a step is on the disks of these nodes."""
        return all(_is_in(self.of(node), step) for node in nodes)


def _is_in(folder: Path, step: int) -> bool:
    return bool(list(folder.glob(f"step-{step:09d}-*/manifest.json")))


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


@pytest.fixture
def sharded_options() -> dict[str, Any]:
    return {"script": SHARDED, "settings": {"restart": {"preload": SHARDED_PRELOAD}}}


@pytest.fixture
def tmpfs() -> Iterator[Any]:
    """A function that mounts a small disk, full or read-only."""
    mounted: list[Path] = []

    def mount(place: Path, what: str) -> None:
        place.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
        if (done := subprocess.run(command, capture_output=True, check=False)).returncode:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
        mounted.append(place)
        if what == "full":
            (place / "others").write_bytes(b"1" * (60 << 10))
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def env_of(disks: Disks, held: bool = False) -> dict[str, str]:
    hold = [[generation, 0, HELD_AT] for generation in range(1, 4)] if held else []
    return {"HPX_SECRET_FILE": str(disks.secret), "HPX_TEST_HOLD": json.dumps(hold)}


def killed(
    job: Any,
    disks: Disks,
    settings: dict[str, Any],
    name: str = "killed",
    more: Any = MappingProxyType({}),
    **options: Any,
) -> Any:
    """A job of which every process was killed once step 6 was on the disks, and the newest one due in a shared tier."""
    due = {
        Path(tier["path"]) / "tiny": 6 // tier["every_steps"] * tier["every_steps"]
        for tier in settings["checkpoint"]["tiers"]
        if tier["kind"] == "file"
    }
    one = job(name, settings=settings, env={**env_of(disks, held=True), **more}, **options).start()
    until(lambda: disks.has(6) and all(_is_in(*one) for one in due.items()), one.logs)
    for node in (0, 1):
        kill_node(one, node)
    one.codes()
    return one


def again(
    job: Any,
    disks: Disks,
    settings: dict[str, Any],
    name: str = "again",
    more: Any = MappingProxyType({}),
    **options: Any,
) -> Any:
    return job(name, settings=settings, env={**env_of(disks), **more}, **options).start()


def test_a_job_of_which_all_processes_were_killed_resumes_from_the_disks(
    job: Any, disks: Disks, undisturbed: dict[str, Any]
) -> None:
    settings = disks.settings()
    killed(job, disks, settings)
    second = again(job, disks, settings)
    report = second.wait()
    assert report["state"] == "succeeded", report["error"]
    restored = [event for event in second.events() if event["event"] == "restored"]
    assert {(event["source"], event["tier"], event["step"]) for event in restored} == {("durable", "disk", 6)}
    assert report["losses"] == {step: loss for step, loss in undisturbed["losses"].items() if int(step) > 6}
    assert report["weights"] == undisturbed["weights"]
    assert report["traffic"]["disk"]["restores"] == 4
    checked = hp_ext("checkpoints", "verify", str(disks.of(0)), "--secret-file", str(disks.secret))
    assert checked.code == 0, checked.stdout + checked.stderr


@pytest.mark.thorough
def test_shards_come_back_from_the_disks_bit_for_bit(
    job: Any, disks: Disks, sharded_options: dict[str, Any], undisturbed_sharded: dict[str, Any]
) -> None:
    """FSDP2: each rank's shard is on its own node alone."""
    settings = disks.settings() | sharded_options.pop("settings")
    hangs = json.dumps([{"what": "hangs", "rank": 0, "step": HELD_AT}])
    killed(job, disks, settings, **sharded_options, more={"HPX_TEST_FAULTS": hangs})
    second = again(job, disks, settings, **sharded_options)
    report = second.wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["resumed_step"] == 6
    assert report["losses"] == {step: loss for step, loss in undisturbed_sharded["losses"].items() if int(step) > 6}


def test_the_newest_step_that_all_nodes_have_is_taken(job: Any, disks: Disks, undisturbed: dict[str, Any]) -> None:
    settings = disks.settings()
    killed(job, disks, settings)
    (newest,) = disks.of(1).glob("step-000000006-*")
    shutil.rmtree(newest)
    report = again(job, disks, settings).wait()
    assert (report["state"], report["resumed_step"]) == ("succeeded", 4), report["error"]
    assert report["weights"] == undisturbed["weights"]


def test_a_node_with_a_new_disk_reads_what_all_hold_from_the_other(job: Any, disks: Disks) -> None:
    settings = disks.settings()
    same = {"HPX_TEST_NORM": "LayerNorm"}
    killed(job, disks, settings, more=same)
    shutil.rmtree(disks.of(1))
    second = again(job, disks, settings, more=same)
    report = second.wait()
    assert (report["state"], report["resumed_step"]) == ("succeeded", 6), report["error"]
    restored = {event["rank"]: event for event in second.events() if event["event"] == "restored"}
    assert {rank: event["tier"] for rank, event in restored.items()} == dict.fromkeys(range(4), "disk")
    assert disks.has(12)


@pytest.mark.parametrize("durable", [True, False], ids=["with a shared tier", "alone"])
def test_a_node_with_a_new_disk_whose_shards_nobody_else_has(job: Any, disks: Disks, durable: bool) -> None:
    """The next tier is taken; without one the job says which disk has what, and starts nothing anew."""
    shared = {"kind": "file", "path": str(disks.folder / "shared"), "every_steps": 4}
    settings = disks.settings(*([shared] if durable else []))
    killed(job, disks, settings)
    shutil.rmtree(disks.of(1))
    report = again(job, disks, settings).wait()
    if durable:
        assert (report["state"], report["resumed_step"]) == ("succeeded", 4), report["error"]
    else:
        assert report["state"] == "failed"
        assert "No step that all 4 ranks can restore" in report["error"]["message"]
        assert "disk step 6 (rank 0), disk step 6 (rank 1)." in report["error"]["message"]


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_disk_that_takes_nothing_is_named_and_training_goes_on(job: Any, disks: Disks, tmpfs: Any, what: str) -> None:
    shared = {"kind": "file", "path": str(disks.folder / "shared"), "every_steps": 4}
    settings = disks.settings(shared)
    tmpfs(disks.folder / "1", what)
    report = again(job, disks, settings, name="first").wait()
    assert (report["state"], report["steps"]) == ("succeeded", 12), report["error"]
    (of_disk,) = [tier for tier in report["tiers"] if tier["node"] == 1 and tier["tier"] == str(disks.of(1))]
    words = {"full": "No space left on device", "read-only": "Read-only file system"}[what]
    assert of_disk["failed"]
    assert words in of_disk["last_error"]
    assert any(words in warning and "node 1" in warning for warning in report["warnings"]), report["warnings"]
    assert disks.has(12, [0])


def test_files_of_another_job_are_no_snapshots_and_stay(job: Any, disks: Disks) -> None:
    settings = disks.settings()
    killed(job, disks, settings)
    others = {file: file.read_bytes() for file in disks.folder.rglob("step-000000006-*/*")}
    disks.secret.write_text("another job has the name now, as long")
    report = again(job, disks, settings).wait()
    assert (report["state"], report["resumed_step"], report["steps"]) == ("succeeded", 0, 12), report["error"]
    assert any(
        "node 0" in warning and "not signed with this job's secret" in warning for warning in report["warnings"]
    ), report
    assert {file: file.read_bytes() for file in others} == others
    assert disks.has(12)
    modes = {oct(path.stat().st_mode & 0o777) for path in disks.of(0).rglob("*") if path.is_file()}
    assert modes == {"0o600"}


@pytest.mark.thorough
def test_disks_with_the_same_step_of_two_runs_are_never_mixed(job: Any, disks: Disks) -> None:
    """Two runs of the job that did not know of each other have saved the same step in the same generation."""
    settings = disks.settings()
    killed(job, disks, settings)
    shutil.move(disks.folder, disks.folder.with_name("of the first"))
    killed(job, disks, settings, name="other")
    shutil.rmtree(disks.of(1))
    shutil.move(disks.folder.with_name("of the first") / "1" / "tiny", disks.of(1))
    report = again(job, disks, settings).wait()
    assert report["state"] == "failed"
    assert "No step that all 4 ranks can restore" in report["error"]["message"]


def test_a_snapshot_that_was_changed_on_a_disk_is_never_loaded(
    job: Any, disks: Disks, undisturbed: dict[str, Any]
) -> None:
    settings = disks.settings()
    killed(job, disks, settings)
    (image,) = disks.of(1).glob("step-000000006-*/__2_0.distcp")
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 1
    image.write_bytes(data)
    second = again(job, disks, settings)
    report = second.wait()
    assert (report["state"], report["resumed_step"]) == ("succeeded", 4), report["error"]
    assert report["weights"] == undisturbed["weights"]
    refused = [event["error"] for event in second.events() if event["event"] == "restore_failed"]
    assert any("__2_0.distcp: CRC64-NVME is" in error for error in refused), refused


def test_two_nodes_that_write_into_one_folder_are_told(job: Any, disks: Disks) -> None:
    settings = disks.settings(path=str(disks.folder))
    report = again(job, disks, settings).wait()
    assert (report["state"], report["steps"]) == ("succeeded", 12), report["error"]
    errors = [tier["last_error"] for tier in report["tiers"] if tier["tier"].startswith(str(disks.folder))]
    assert any(error and "of another node" in error for error in errors), errors


def test_a_node_whose_pod_comes_again_restores_from_its_disk_while_the_job_runs(job: Any, disks: Disks) -> None:
    """The others have that step of the same run in their memory."""
    settings = disks.settings() | {"restart": {"lease_s": 4.0}}
    running = job("job", nodes=3, workers_per_node=1, settings=settings, env=env_of(disks, held=True)).start()
    until(lambda: disks.has(6, (0, 1, 2)), running.logs)
    kill_node(running, 2)
    running.until("node_lost", node=2)
    (running.folder / "let-go").touch()
    running.agents[2].wait()
    running.agents[2] = running.start_agent(2, "--rejoin")
    report = running.wait()
    assert report["state"] == "succeeded", report["error"]
    assert report["recoveries"][0]["resumed_step"] == 6
    restored = [event for event in running.events() if event["event"] == "restored" and event["generation"] == 2]
    assert {event["rank"]: event.get("tier") or event["source"] for event in restored}[2] == "disk"
    assert report["recoveries"][0]["source"] == "disk"
