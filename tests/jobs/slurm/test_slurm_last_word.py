"""The last word of a job on Slurm is the same whoever is asked, with a report of its agents and without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import call_hp_ext
from killing import disagreements
from made_events import entry

from hyperpod_ext.jobs.contract import records
from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.report import make_report

CAUSE = "rank 1 (node 1) at step 7: ValueError: odd (train.py:3); 2 times in a row"
EVENTS = [
    entry(1.0, "job_started", world_size=2),
    entry(2.0, "fault", rank=1, node=1, step=7, cause="ValueError: odd (train.py:3)"),
    entry(3.0, "job_ended", state="failed"),
]


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
def test_all_commands_have_the_same_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: bool, state: str
) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    record = {"id": "17", "cluster": "research", "folder": str(tmp_path), "runs": "hpx-runs"}
    records.remember("hyperpod-slurm", "a", {**record, "world_size": 2, "submitted_at": "2026-11-21T10:00:00"})
    start = tmp_path / "hpx-runs" / "a" / "17" / "0.0"
    start.mkdir(parents=True)
    (start / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    if reported:
        hint = "The full output of the rank is in rank1.log."
        error = {"code": "JobFailedError", "message": CAUSE, "hint": hint} if state == "FAILED" else None
        report = make_report(Events(), state=state.lower(), error=error, world_size=2)
        (start / "report.json").write_text(json.dumps(report))
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '17|{state}|2026-11-21T10:00:00|2026-11-21T11:00:00|None'\n")
    (tmp_path / "squeue").chmod(0o755)
    url = "hyperpod-slurm://research/a"
    status, waited, shown = (call_hp_ext(each, url, "-o", "json") for each in ("status", "wait", "report"))
    assert disagreements(shown.json, {"status": status.json, "wait": waited.json}, waited, None) == []
    if state == "FAILED":
        assert "ValueError: odd" in shown.json["error"]["message"]


@pytest.mark.parametrize("wrong", ["", "[]", '{"id": "17"}', '{"id": 17, "cluster": "c", "folder": {}, "runs": null}'])
@pytest.mark.parametrize("target", ["hyperpod-slurm", "sagemaker"])
def test_a_damaged_record_of_a_job_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, wrong: str
) -> None:
    monkeypatch.setenv("HPX_HOME", str(tmp_path))
    records.remember(target, "a", {})
    file = tmp_path / target / "a.json"
    file.write_text(wrong)
    for command in (["status", "a"], ["list"], ["cancel", "a"]):
        done = call_hp_ext(*command, "--target", target)
        assert (done.code, done.stdout) == (3, "")
        assert done.stderr.startswith(f"error: {file}: ")
