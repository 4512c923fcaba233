"""Under plain torchrun: exceptions are met in the processes, deaths by torchrun, and the log says so."""

from __future__ import annotations

import launched
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_an_exception_in_the_first_step_ends_no_process(tmp_path, undisturbed):
    job = launched.Launched(tmp_path / "job", {"what": "exception", "rank": 0, "step": 1})
    ended = job.torchrun()
    assert ended.returncode == 0, ended.stderr
    launched.assert_equal(job, undisturbed)
    assert job.went_on_from() == [0, 0]
    assert all(len(set(job.pids(rank))) == 1 for rank in range(4)), "every process stayed"
    assert "under torchrun, exceptions are met in the process" in ended.stderr
    assert "torchrun ends the job (--max-restarts 0)" in ended.stderr


@pytest.mark.soak
def test_the_same_exception_again_is_left_to_torchrun(tmp_path):
    job = launched.Launched(tmp_path / "job", {"what": "exception", "rank": 2, "step": 5, "always": True})
    ended = job.torchrun()
    assert ended.returncode != 0
    assert "it happens each time, so torchrun hears of it" in ended.stderr
    assert job.went_on_from() == [0, 4]


@pytest.mark.soak
def test_a_death_is_torchruns_and_state_comes_from_the_nodes_memory(tmp_path, undisturbed):
    job = launched.Launched(tmp_path / "job", {"what": "before backward", "rank": 1, "step": 6})
    ended = job.torchrun("--max-restarts", "1")
    assert ended.returncode == 0, ended.stderr
    launched.assert_equal(job, undisturbed)
    assert job.went_on_from() == [0, 5]
    assert all(len(set(job.pids(rank))) == 2 for rank in range(4)), "all processes began again"
