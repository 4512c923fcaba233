"""All ranks save or none does; all load the same step, and never one that is torn or damaged."""

from __future__ import annotations

import ast

import pytest
from dcp_job import Job
from waiting import until


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("budget", "rank 1: rank 1 (2 slots of 32."),
        ("json", "rank 1: extra is a value of type set"),
        ("sparse", "rank 1: extra is a tensor of type torch.float32 and layout torch.sparse_coo"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_costs_nothing(job: Job, how: str, words: str) -> None:
    policy = {"tiers": [{"kind": "memory", "budget_mib": 8}]}
    for raised in job.run("save_where_one_fails", 2, how=how, policy=policy):
        assert words in raised


def test_a_step_that_one_rank_never_sealed_is_not_loaded_by_any(job: Job) -> None:
    running = job.start("save_torn", 3)
    running.wait()
    digests = ast.literal_eval((job.sockets / "digests0").read_text())
    for loaded in job.run("load", 3, kind="fsdp"):
        assert loaded == {"latest": 20, "step": 20, "digest": digests["20"]}


def test_a_flipped_bit_in_memory_sends_all_ranks_to_the_older_step(job: Job) -> None:
    digests = job.run("save_and_flip", 2)[0]
    for loaded in job.run("load", 2, kind="fsdp"):
        assert loaded == {"latest": 20, "step": 10, "digest": digests["10"]}
    (text, _) = job.run("load_error", 2, kind="fsdp", step=20)
    assert "of the last attempt: step 20 of rank 1 in memory: snapshot of rank 1 at step 20: CRC64-NVME is" in text


def test_a_flipped_bit_in_memory_sends_all_ranks_to_the_next_tier(job: Job) -> None:
    policy = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": f"{job.directory}/f", "every_steps": 10}]}
    digests = job.run("save_and_flip", 2, policy=policy)[0]
    for loaded in job.run("load", 2, kind="fsdp", policy=policy):
        assert loaded == {"latest": 20, "step": 20, "digest": digests["20"]}


def test_a_damaged_file_sends_all_ranks_to_the_older_step(job: Job) -> None:
    policy = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": f"{job.directory}/f", "every_steps": 1}]}
    digests = job.run("save", 2, kind="fsdp", steps=[1, 2], policy=policy, wait_for_upload=True)[0]
    job.lose_memory()
    image = next((job.directory / "f" / "j").glob("step-000000002-*/__1_0.distcp"))
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 1
    image.write_bytes(data)
    for ranks in (2, 3):  # read by who wrote it, and cut anew
        for loaded in job.run("load", ranks, kind="fsdp", policy=policy):
            assert loaded == {"latest": 1, "step": 1, "digest": digests["1"]}


def test_what_cannot_be_read_is_not_taken_for_nothing(job: Job) -> None:
    policy = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": f"{job.directory}/f", "every_steps": 1}]}
    job.run("save", 1, kind="plain", steps=[1, 2], policy=policy, wait_for_upload=True)
    job.lose_memory()
    secret = job.directory / "state" / "hyperpod_ext" / "secrets" / "j"
    secret.write_text("another secret than that one")
    before = {path: path.stat().st_mtime_ns for path in (job.directory / "f").rglob("*.*")}
    for scene, arguments in (("load", {}), ("save", {"steps": [1]})):
        (raised,) = job.start(scene, 1, kind="plain", policy=policy, **arguments).answers()
        assert "Not readable: " in raised["text"]
        assert ": not signed with this job's secret. Either the manifest was changed" in raised["text"]
    assert {path: path.stat().st_mtime_ns for path in (job.directory / "f").rglob("*.*")} == before


def test_a_tier_that_cannot_be_used_is_told_before_the_first_save_and_its_server_ends(job: Job) -> None:
    (job.directory / "f").write_text("no folder")
    policy = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": f"{job.directory}/f", "every_steps": 1}]}
    for raised in job.start("load", 2, kind="plain", policy=policy).answers():
        assert f"rank 0: Cannot use {job.directory}/f/j: Not a directory" in raised["text"]
    until(lambda: not job.servers(), "who mends its environment would meet the old one")
