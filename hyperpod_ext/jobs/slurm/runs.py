"""Reads the files of a job on Slurm in the shared folder, and merges the results of its starts.

Slurm may start a job several times, because it requeues the job or restarts its step.

RUNS/NAME/secret               secret of all jobs with this name
RUNS/NAME/JOBID/job.sbatch     the submitted file
RUNS/NAME/JOBID/0.0/           run folder of the first start: events.jsonl, report.json, logs/
RUNS/NAME/JOBID/0.1/           run folder after the first restart of the step
RUNS/NAME/JOBID/1.0/           run folder after the first requeue
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.contract.job_status import FINAL_STATES
from hyperpod_ext.jobs.contract.run_files import LogReader, Tail, last_step, read_event
from hyperpod_ext.jobs.job_files.job_report import ReportOutput
from hyperpod_ext.jobs.job_files.json_files import read_checked
from hyperpod_ext.jobs.local.result import EMPTY_REPORT, JobReport

_START = re.compile(r"(\d+)\.(\d+)")
_TAIL_LINES = 20


def starts(job_dir: Path) -> list[Path]:
    """Return the run folders of all starts of the job, oldest first.

    Args:
        job_dir: the job's folder, RUNS/NAME/JOBID.
    """
    found = [entry for entry in job_dir.iterdir() if _START.fullmatch(entry.name)] if job_dir.is_dir() else []
    return sorted(found, key=lambda entry: tuple(map(int, entry.name.split("."))))


class JobReader:
    """Reads the events and log lines of all starts of a job, each line once.

    Args:
        job_dir: the job's folder, RUNS/NAME/JOBID.
        batch_log: output of the batch script.
        rank: read only lines of this rank; None reads lines of all ranks and nodes.
    """

    def __init__(self, job_dir: Path, batch_log: Path, rank: int | None = None) -> None:
        self._job_dir, self._rank = job_dir, rank
        self._batch = Tail(batch_log)
        self._events: dict[Path, Tail] = {}
        self._logs: dict[Path, LogReader] = {}
        self._nodes: dict[Path, Tail] = {}

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Yield the events that were added since the previous call, each with the field `run: main`."""
        for start in starts(self._job_dir):
            for line in self._events.setdefault(start, Tail(start / "events.jsonl")).lines():
                if event := read_event(line):
                    yield event | {"run": "main"}

    def lines(self) -> Iterator[str]:
        """Yield the log lines of batch script, nodes and workers that were added since the previous call."""
        if self._rank is None:
            yield from (f"batch | {line}" for line in self._batch.lines())
        for start in starts(self._job_dir):
            yield from self._logs.setdefault(start, LogReader(start, self._rank)).lines()
            if self._rank is not None:
                yield from self._printed_by_torchrun(start, f"rank {self._rank} | ")

    def _printed_by_torchrun(self, start: Path, mark: str) -> Iterator[str]:
        """Yield new lines of one rank from the log files of the nodes.

        torchrun writes no log files of ranks, but prefixes each line with its rank.

        Args:
            start: run folder of a start.
            mark: prefix of the rank's lines.
        """
        for file in sorted((start / "logs").glob("node*.log")):
            tail = self._nodes.setdefault(file, Tail(file))
            yield from (line for line in tail.lines() if line.startswith(mark))


def newest_step(job_dir: Path) -> dict[str, Any]:
    """Return the newest event that has the job's progress, from all starts; {} without such an event."""
    return next((event for start in reversed(starts(job_dir)) if (event := last_step(start / "events.jsonl"))), {})


def make_result(job_dir: Path, batch_log: Path, state: str, cause: str) -> JobReport:
    """Return the report of the job's last start, with the losses of all starts.

    Args:
        state: state of the job as Slurm reports it.
        cause: error message if the job failed and no report names the cause.
    """
    folders = starts(job_dir)
    reports = [_report(folder) for folder in folders]
    last = (reports[-1] if reports else None) or {}
    result = EMPTY_REPORT | last
    result["losses"] = {step: loss for report in reports for step, loss in (report or {}).get("losses", {}).items()}
    for folder, report in zip(folders, reports, strict=True):
        if report is None:  # the start was killed before it wrote a report
            result["losses"] = _losses(folder) | result["losses"]
    result["losses"] = dict(sorted(result["losses"].items(), key=lambda item: int(item[0])))
    result["starts"] = len(folders)
    result["state"] = state
    if state == "succeeded":
        result["error"] = None
    elif state == "failed" and not result["error"]:
        printed = "\n".join(_tail(batch_log) + (_tail(folders[-1] / "logs" / "node0.log") if folders else []))
        message = f"{cause}\n{printed}".rstrip()
        result["error"] = {"code": "JobFailedError", "message": message, "hint": f"see {batch_log}"}
    return result


def reported_state(job_dir: Path) -> str | None:
    """Return the final state in the report of the job's newest start; None without a report with a final state."""
    folders = starts(job_dir)
    reported = (_report(folders[-1]) or {}).get("state") if folders else None
    return str(reported) if reported in FINAL_STATES else None


def _losses(folder: Path) -> dict[str, Any]:
    losses = {}
    for event in _events(folder):
        match event:
            case {"event": "step", "rank": 0, "step": int(step), "loss": None | int() | float() as loss}:
                losses[str(step)] = loss
    return losses


def _events(folder: Path) -> list[dict[str, Any]]:
    return [event for line in Tail(folder / "events.jsonl").lines() if (event := read_event(line))]


def _report(folder: Path) -> JobReport | None:
    with suppress(FileNotFoundError, ConfigError):
        return read_checked(folder / "report.json", ReportOutput)
    return None


def _tail(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except FileNotFoundError:
        return []
