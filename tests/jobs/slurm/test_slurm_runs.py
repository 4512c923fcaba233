"""What a job on Slurm left in its folder, read when a disk was full or its node was killed in the middle of a line."""

from __future__ import annotations

from pathlib import Path

from hyperpod_ext.jobs.slurm.runs import JobReader, make_result, newest_step

LINES = """\
{"t": 1.0, "event": "step", "rank": 0, "step": 1, "loss": 2.0}
{"t": 2.0, "event": "st{"t": 3.0, "event": "step", "rank": 0, "step": 2, "loss": 1.5}
{"t": 4.0, "event": "step", "rank": 0, "step": 3, "loss": 1.0}
{"t": 5.0, "event": "st"""


def test_a_job_that_is_started_again_is_as_far_as_it_has_come(tmp_path: Path) -> None:
    """One that had made all its steps makes none."""
    start = tmp_path / "job" / "0.1"
    start.mkdir(parents=True)
    (start / "events.jsonl").write_text('{"t": 1.0, "event": "begun", "rank": 0, "step": 25, "of": 25}\n')
    assert (newest_step(start.parent)["step"], newest_step(start.parent)["of"]) == (25, 25)


def test_a_line_that_is_no_event_stops_nobody_who_follows_the_job(tmp_path: Path) -> None:
    start = tmp_path / "job" / "0.0"
    start.mkdir(parents=True)
    (start / "events.jsonl").write_text(LINES)
    job, log = start.parent, tmp_path / "batch.log"
    assert [event["step"] for event in JobReader(job, log).events()] == [1, 3]
    assert newest_step(job)["step"] == 3
    assert make_result(job, log, "failed", "killed")["losses"] == {"1": 2.0, "3": 1.0}
