"""What the batch script does when all nodes have ended: is the job over, or was it Slurm that ended this start?"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.slurm.script import job_script
from hyperpod_ext.runtime.events import log as event_log

SHELLS = [["dash"], ["bash", "--posix"]]
"""What `sh` is on Ubuntu, and on Amazon Linux."""
QUEUED, ENDED = 99, 130
DURABLE = {"checkpoint": {"tiers": [{"kind": "file", "path": "/fsx"}]}}
LIMIT = {**DURABLE, "timeouts": {"run_s": 600}, "slurm": {"requeue_at_limit": True}}
ELASTIC = {"nodes": 2, "elastic": {"min_nodes": 1, "max_nodes": 3}}
RUNS = "JobState=RUNNING Reason=None PreemptTime=None"
PREEMPTED = "JobState=RUNNING Reason=None PreemptTime=2026-11-21T19:12:53"
CANCELLED = "JobState=CANCELLED Reason=None PreemptTime=2026-11-21T19:12:53"
EVENTS: dict[str, dict[str, Any]] = {
    "step": {"generation": 1, "rank": 0, "step": 1, "began": 1.0},
    "generation": {"generation": 1, "step": 0, "world_size": 2},
}
WARN = 'read -r _ _ _ script _ <"/proc/$PPID/stat"; kill -USR1 "$script"'
"""Slurm signals the batch script alone, whose child waits for the step."""
STEP, OTHER = (event_log.checked(name, fields, t=1.0)[1].decode().strip() for name, fields in EVENTS.items())
"""As the job itself writes them."""


def run(folder: Path, fields: dict[str, Any], srun: str, shown: str, events: str = STEP, report: str = "") -> int:
    """Exit code of the script, with commands that say what Slurm would; it is QUEUED when the job is queued again."""
    start = folder / "hpx-runs" / "a" / "17" / "0.0"
    begin = f"mkdir -p '{start}'; echo '{events}' >'{start}/events.jsonl'"
    told = f"printf '  \"state\": \"{report}\"\\n' >'{start}/report.json'; " if report else ""
    programs = {
        "srun": f"{begin}; {told}{srun}",
        "scontrol": f'case $1 in requeue) exit 0 ;; *) echo "JobId=17 JobName=a {shown} Comment=x" ;; esac',
        "squeue": "echo 2",
        "scancel": ":",
        "sleep": f"exit {QUEUED}",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    spec = JobConfig.model_validate_json(json.dumps({"name": "a", "script": "train.py", **fields}))
    (folder / "job.sbatch").write_text(job_script(spec))
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "17"}
    env |= {"SLURM_JOB_NUM_NODES": "2"}
    codes = {
        subprocess.run([*shell, "job.sbatch"], env=env, cwd=folder, capture_output=True, timeout=100).returncode
        for shell in SHELLS
    }
    (code,) = codes
    return code


@pytest.mark.parametrize(
    ("fields", "shown", "code"),
    [
        (DURABLE, PREEMPTED, QUEUED),
        (DURABLE, RUNS, ENDED),
        (DURABLE, CANCELLED, ENDED),
        ({"slurm": {"requeue": False}}, PREEMPTED, ENDED),
        ({"mode": "plain"}, PREEMPTED, ENDED),
    ],
)
def test_a_job_that_is_preempted_is_queued_again_and_one_that_is_cancelled_is_not(
    tmp_path: Path, fields: dict[str, Any], shown: str, code: int
) -> None:
    assert run(tmp_path, fields, "exit 130", shown) == code


@pytest.mark.parametrize(
    ("shown", "events", "code"),
    [(RUNS, STEP, QUEUED), (RUNS, OTHER, ENDED), (CANCELLED, STEP, ENDED)],
)
def test_a_job_is_queued_again_at_its_limit_if_it_comes_forward(
    tmp_path: Path, shown: str, events: str, code: int
) -> None:
    assert run(tmp_path, LIMIT, f"{WARN}; exit 130", shown, events) == code


def test_a_limit_that_comes_as_the_job_ends_by_itself_changes_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, LIMIT, WARN, RUNS, report="succeeded") == 0
    assert run(tmp_path, LIMIT, f"{WARN}; exit 7", RUNS, report="failed") == 7
    assert run(tmp_path, LIMIT, "exit 130", RUNS, report="cancelled") == ENDED


def test_a_job_whose_nodes_have_all_left_is_queued_again_or_has_failed(tmp_path: Path) -> None:
    assert run(tmp_path, ELASTIC, "exit 0", RUNS) == QUEUED
    assert run(tmp_path, {**ELASTIC, "slurm": {"requeue": False}}, "exit 0", RUNS) == 1
