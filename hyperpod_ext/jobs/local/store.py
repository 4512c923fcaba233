"""Files of local jobs: one folder for each submission, and one lock for each job name.

    $HPX_HOME/local/NAME/lock       held by the engine while the job runs
    $HPX_HOME/local/NAME/0001/      one submission
        job.json  node.sh           the submitted job
        status.json  result.json    replaced atomically
        engine.pid  engine.log
        nodes_ended.jsonl           end of each agent
        reserved                    disk space reserved for the result, released if the disk is full
        main/  undisturbed/         run folders: events.jsonl, report.json, logs/

This module imports only the standard library, because the engine process imports it first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ext.errors import ConflictError, HyperpodExtError, NotFoundError
from hyperpod_ext.files import (
    make_private_folder,
    open_private,
    open_regular,
    release_room,
    reserve_room,
    write_atomically,
)
from hyperpod_ext.jobs.contract.home import home
from hyperpod_ext.jobs.job_files.json_files import read_checked, read_model, read_object
from hyperpod_ext.jobs.local.result import NodeEnd, without_numbers

if TYPE_CHECKING:
    from hyperpod_ext.config.job.job import JobConfig

_RESULT = "result.json"
KEPT = 10
"""Number of submissions whose folders are kept for each job name."""
_ENDED = frozenset({"succeeded", "failed", "cancelled"})
_LOCK_TIMEOUT_S = 0.3
"""Seconds to wait for the lock of a job's name, because a process that checks the lock holds it for a moment."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One submission of a local job, stored in `folder`."""

    folder: Path

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.folder.parent.name

    @property
    def handle(self) -> str:
        """The job's URL."""
        return f"local://localhost/{self.name}"

    @property
    def job_file(self) -> Path:
        return self.folder / "job.json"

    @property
    def script(self) -> Path:
        return self.folder / "node.sh"

    @property
    def pid_file(self) -> Path:
        return self.folder / "engine.pid"

    @property
    def status_file(self) -> Path:
        return self.folder / "status.json"

    @property
    def engine_log(self) -> Path:
        return self.folder / "engine.log"

    @property
    def result_file(self) -> Path:
        return self.folder / _RESULT

    def run_dir(self, run: str) -> Path:
        """Return the folder of the `main` or the `undisturbed` run."""
        return self.folder / run

    def read_status(self) -> dict[str, Any]:
        """Return the content of status.json.

        Raises:
            ConfigError: the file is damaged.
        """
        from hyperpod_ext.jobs.job_files.job_report import StatusFile

        status = read_checked(self.status_file, StatusFile)
        if status["state"] not in _ENDED and (result := self._result_elsewhere(status)) is not None:
            status |= {"state": result["state"], "error": result["error"]}
        return status

    def read_job(self) -> JobConfig:
        """Return the job's spec from job.json.

        Raises:
            ConfigError: the file is damaged.
        """
        from hyperpod_ext.config.job.job import JobConfig

        return read_model(self.job_file, JobConfig)

    def write_status(self, **changes: object) -> None:
        """Replace the fields `changes` in status.json."""
        _write(self.status_file, read_object(self.status_file) | changes)

    def read_result(self) -> dict[str, Any]:
        """Return the content of result.json.

        Raises:
            FileNotFoundError: the job has not ended, or no result could be written.
            ConfigError: the file is damaged.
        """
        from hyperpod_ext.jobs.job_files.job_report import ReportOutput

        try:
            return read_checked(self.result_file, ReportOutput)
        except FileNotFoundError:
            if (kept := self._result_elsewhere(self.read_status())) is None:
                raise
            return kept

    def end(self, result: Mapping[str, Any]) -> None:
        """Write the result, then the final status, so that readers of a final status find the result.

        If the disk has no room for the complete result, a result without numbers is written. If the disk cannot be
        written at all, the result without numbers is written to the temporary directory.

        Raises:
            HyperpodExtError: neither the disk nor the temporary directory can be written.
        """
        try:
            try:
                _write(self.result_file, result)
            except HyperpodExtError as error:
                _write(self.result_file, without_numbers(self.name, self.handle, result, error.message))
            self.write_status(state=result["state"], error=result["error"], ended_at=now())
        except HyperpodExtError as error:
            if (scratch := self.read_status().get("scratch")) is None:
                raise
            _write(_elsewhere(scratch), without_numbers(self.name, self.handle, result, error.message))
        release_room(self.folder)

    def _result_elsewhere(self, status: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result that `end` wrote to the temporary directory; None without such a file."""
        try:
            with open_regular(_elsewhere(status["scratch"])) as file:
                ours = os.fstat(file.fileno()).st_uid == os.getuid()
                result: dict[str, Any] | None = json.load(file) if ours else None
        except (OSError, ValueError, KeyError):
            return None
        return result

    def node_ended(self, end: NodeEnd) -> None:
        """Record the end of a node's agent, for the case that the engine dies.

        If the disk is full or broken, the end is not recorded.
        """
        if self.is_removed():
            return
        with contextlib.suppress(OSError), open_private(self.folder / "nodes_ended.jsonl", "a") as file:
            file.write(json.dumps(asdict(end)) + "\n")

    def node_ends(self) -> list[NodeEnd]:
        """Return all ends of agents that `node_ended` has recorded, oldest first."""
        try:
            lines = (self.folder / "nodes_ended.jsonl").read_text().splitlines()
        except OSError:
            return []
        ends = []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # a full disk may have truncated the line
                ends.append(NodeEnd(**json.loads(line)))
        return ends

    def is_removed(self) -> bool:
        """Return whether the submission's folder was removed."""
        return not self.status_file.exists()

    def has_ended(self) -> bool:
        """Return whether the job has ended."""
        return self.read_status()["state"] in _ENDED

    def is_running(self) -> bool:
        """Return whether the job's engine runs."""
        return _is_locked(self.folder.parent) and latest(self.name, self.folder.parent.parent) == self


def now() -> str:
    """Return the current time as ISO text with whole seconds, for status files."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def names(at: Path | None = None) -> list[str]:
    """Return the names of all local jobs that have a submission.

    Args:
        at: folder of all local jobs; None means the folder of this user.
    """
    folder = at or home()
    return sorted(entry.name for entry in folder.iterdir() if latest(entry.name, folder)) if folder.is_dir() else []


def latest(name: str, at: Path | None = None) -> Submission | None:
    """Return the newest submission of the job `name`; None if no submission is left.

    Args:
        at: folder of all local jobs; None means the folder of this user.
    """
    found = _numbered((at or home()) / name)
    return Submission(found[-1]) if found else None


def find(name: str) -> Submission:
    """Return the newest submission of `name`.

    Raises:
        NotFoundError: there is no such job.
    """
    from hyperpod_ext.config.files.nearest import suggest_or_list

    if (submission := latest(name)) is None:
        hint = suggest_or_list(name, names(), "hp-ext list")
        hint += " local jobs; for a job of another target, write its URL, such as hyperpod-slurm://CLUSTER/NAME"
        raise NotFoundError(f"there is no local job named {name}", hint=hint)
    return submission


def find_running(name: str) -> Submission:
    """Return the newest submission of the job `name`, which must be running.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: the job does not run.
    """
    submission = find(name)
    if not submission.is_running():
        raise ConflictError(f"{name} is not running", hint="start the job again with `hp-ext create-job`")
    return submission


@contextlib.contextmanager
def locked(name: str) -> Iterator[int | None]:
    """Acquire the lock of the job's name for this `with` block.

    Yields the lock's descriptor, or None if another process holds the lock. If a child process inherits the lock's
    descriptor, the child holds the lock after the block.
    """
    folder = home() / name
    make_private_folder(folder)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor if _take(descriptor) else None
    finally:
        os.close(descriptor)


def create(name: str) -> Submission:
    """Create the folder of a new submission of the job `name`, and remove the oldest folders, so that `KEPT` remain.

    The caller must hold the lock of the name.
    """
    folder = home() / name
    before = _numbered(folder)
    submission = Submission(folder / f"{int(before[-1].name) + 1 if before else 1:04d}")
    draft = Submission(folder / "draft")
    shutil.rmtree(draft.folder, ignore_errors=True)
    draft.folder.mkdir(mode=0o700)
    write_atomically(
        draft.status_file, json.dumps({"name": name, "state": "starting", "submitted_at": now(), "error": None})
    )
    reserve_room(draft.folder)
    draft.folder.rename(submission.folder)  # `rename` last, so that readers find a complete folder
    for old in _beyond_kept(before):
        shutil.rmtree(old)
    return submission


def removed_by_next(name: str) -> list[Path]:
    """Return the folders of old submissions that the next submission of `name` will remove."""
    return _beyond_kept(_numbered(home() / name))


def _beyond_kept(before: list[Path]) -> list[Path]:
    """Return the folders in `before` that a new submission removes.

    Args:
        before: folders of all existing submissions of the name, oldest first.
    """
    return before[: max(len(before) + 1 - KEPT, 0)]


def _numbered(folder: Path) -> list[Path]:
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((entry for entry in entries if entry.name.isdecimal()), key=lambda entry: int(entry.name))


def _take(descriptor: int) -> bool:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _elsewhere(scratch: str) -> Path:
    """Return the path of the result in the temporary directory, next to `scratch`, the folder of the job's sockets."""
    return Path(f"{scratch}.result.json")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the JSON file `path` atomically.

    Raises:
        HyperpodExtError: the disk is full, or the folder cannot be written.
    """
    try:
        write_atomically(path, json.dumps(content, indent=2) + "\n", last=path.name == _RESULT)
    except FileNotFoundError:  # the job's folder was removed: not a problem of the disk
        raise
    except OSError as error:
        raise HyperpodExtError(
            f"{path} cannot be written: {error.strerror}",
            hint="Free space there, or set HPX_HOME to a folder on another disk.",
        ) from error
