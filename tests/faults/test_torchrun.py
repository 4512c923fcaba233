"""Under plain torchrun: exceptions are met in the processes, deaths by torchrun, and the log says so."""

from __future__ import annotations

import shutil

import launched
import pytest

pytestmark = [pytest.mark.slow]


@pytest.mark.thorough
def test_an_exception_in_the_first_step_ends_no_process_and_the_last_one_is_durable(tmp_path, undisturbed):
    fault, seldom = {"what": "exception", "rank": 0, "step": 1}, {"every_steps": 50}
    job = launched.Launched(tmp_path / "job", fault, durable=True, every=seldom)
    ended = job.torchrun()
    assert ended.returncode == 0, ended.stderr
    launched.assert_equal(job, undisturbed)
    assert job.went_on_from() == [0, 0]
    assert all(len(set(job.pids(rank))) == 1 for rank in range(4)), "every process stayed"
    assert "under torchrun, exceptions are handled in the process" in ended.stderr
    assert "torchrun ends the job (--max-restarts 0)" in ended.stderr
    assert "hyperpod_ext: step 12 goes to the durable tiers\n" in ended.stderr
    assert "warning:" not in ended.stderr
    report = job.report()
    assert (report["durable"][0]["newest_step"], report["warnings"]) == (12, [])
    assert (tmp_path / "job" / "durable" / "tiny" / "step-000000012-g000002" / "manifest.json").exists()


@pytest.mark.soak
def test_the_same_exception_again_is_left_to_torchrun(tmp_path):
    job = launched.Launched(tmp_path / "job", {"what": "exception", "rank": 2, "step": 5, "always": True})
    ended = job.torchrun()
    assert ended.returncode != 0
    assert "the same exception has repeated, so this process ends and torchrun takes over" in ended.stderr
    assert job.went_on_from() == [0, job.committed(1)]


@pytest.mark.thorough
def test_a_process_that_cannot_use_its_gpu_any_more_ends(tmp_path, undisturbed):
    job = launched.Launched(tmp_path / "job", {"what": "illegal access", "rank": 1, "step": 6})
    ended = job.torchrun("--max-restarts", "1")
    assert ended.returncode == 0, ended.stderr
    launched.assert_equal(job, undisturbed)
    assert "this process cannot continue, so this process ends and torchrun takes over" in ended.stderr
    assert job.went_on_from() == [0, job.committed(1)]


@pytest.mark.soak
def test_a_death_is_torchruns_and_state_comes_from_the_nodes_memory(tmp_path, undisturbed):
    job = launched.Launched(tmp_path / "job", {"what": "before backward", "rank": 1, "step": 6})
    ended = job.torchrun("--max-restarts", "1")
    assert ended.returncode == 0, ended.stderr
    launched.assert_equal(job, undisturbed)
    assert job.went_on_from() == [0, job.committed(1)]
    assert all(len(set(job.pids(rank))) == 2 for rank in range(4)), "all processes began again"


@pytest.mark.thorough
def test_a_death_on_one_of_two_nodes_is_their_torchruns(tmp_path, undisturbed):
    """Each torchrun counts its own faults alone: here 1 and 0."""
    job = launched.Launched(tmp_path / "job", {"what": "before backward", "rank": 2, "step": 6})
    assert job.torchruns("--max-restarts", "1") == [0, 0]
    launched.assert_equal(job, undisturbed)
    assert job.went_on_from() == [0, job.committed(1)]
    assert all(len(set(job.pids(rank))) == 2 for rank in range(4)), "all processes began again"


@pytest.mark.thorough
def test_a_tier_that_goes_by_time_is_written_to(tmp_path):
    job = launched.Launched(tmp_path / "job", durable=True, every={"every_seconds": 0.5}, steps=400)
    ended = job.torchrun()
    assert ended.returncode == 0, ended.stderr
    times = [event["t"] for event in job.events() if event["event"] == "step" and event["rank"] == 0]
    saved = {int(folder.name.split("-")[1]) for folder in (tmp_path / "job" / "durable" / "tiny").glob("step-*")}
    by_time = saved - {400}  # the last step is saved whatever the time
    assert 400 in saved
    assert 1 <= len(by_time) <= (max(times) - min(times)) / 0.5 + 1, "no more often than was asked for"


@pytest.mark.thorough
def test_a_job_whose_processes_have_all_ended_resumes_from_the_nodes_disk(tmp_path, undisturbed):
    first = launched.Launched(tmp_path / "job", durable=True, kind="disk", steps=8)
    assert first.torchrun().returncode == 0
    again = launched.Launched(tmp_path / "again", durable=True, kind="disk")
    again.folder.mkdir()
    shutil.copy(first.folder / "secret", again.folder / "secret")
    (again.folder / "durable").symlink_to(first.folder / "durable")
    ended = again.torchrun()
    assert ended.returncode == 0, ended.stderr
    assert again.went_on_from() == [8]
    assert {(e["source"], e["tier"]) for e in again.events() if e["event"] == "restored"} == {("durable", "disk")}
    assert again.report()["weights"] == undisturbed["weights"]
