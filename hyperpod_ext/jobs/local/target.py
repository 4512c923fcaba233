"""Target `local`: runs jobs on this machine. Each node of a job is a process tree that uses the loopback interface."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import ConfigError, ConflictError, HyperpodExtError, JobFailedError, Problem
from hyperpod_ext.extras import missing_packages
from hyperpod_ext.files import open_private, write_atomically
from hyperpod_ext.jobs.contract.capabilities import Capabilities
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate
from hyperpod_ext.jobs.contract.render import render as fill
from hyperpod_ext.jobs.local import store as local_store
from hyperpod_ext.jobs.local import watch as local_watch
from hyperpod_ext.jobs.local.result import EMPTY_REPORT

if TYPE_CHECKING:
    from hyperpod_ext.jobs.contract.plan_type import Plan
    from hyperpod_ext.jobs.contract.targets import Target

PARTS = {
    "faults": "hyperpod_ext.jobs.fault_injection.local",
    "move": "hyperpod_ext.jobs.local.resize",
    "resize": "hyperpod_ext.jobs.local.resize",
}
INSTEAD = {
    "leftovers": "the job's files are in the folder that `hp-ext status` shows",
    "ports": "the job's processes and ports are on this machine",
    "shell": "the job's processes are on this machine: `hp-ext status` shows the folder of their files",
}
_CANCEL_TIMEOUT_S = 60.0


def capabilities() -> Capabilities:
    """Return the capabilities of target `local`."""
    return Capabilities(
        chaos=True,
        process_restart=True,
        spares=True,
        elastic=True,
        command=True,
        reads=frozenset({"log_rules", "metrics", "network"}),
    )


def render(job: JobConfig, cluster: ClusterConfig | None) -> dict[str, str]:
    """Render `node.sh`, which the engine starts for each node."""
    del cluster  # no cluster is needed, because local jobs run on this machine
    runtime = RuntimeConfig.of(job)
    if job.nodes + job.spares > 1:
        runtime = runtime.model_copy(update={"checkpoint": runtime.checkpoint.on_one_machine()})
    if job.command is not None:  # no hang detection, because a command reports no steps
        hang = runtime.restart.hang.model_copy(update={"enabled": False})
        runtime = runtime.model_copy(update={"restart": runtime.restart.model_copy(update={"hang": hang})})
    text = runtime.model_dump_json()
    return {"node.sh": fill("local/node.sh.j2", job=job, runtime=text, command=job.words, raw=job.command is not None)}


def problems(job: JobConfig) -> Iterator[Problem]:
    """Yield nothing: local jobs have no problems except missing capabilities."""
    del job
    return iter(())


def warnings(job: JobConfig) -> Iterator[str]:
    """Yield nothing: local jobs need no warnings."""
    del job
    return iter(())


def submit(plan: Plan) -> JobHandle:
    """Start the engine in the background. The engine holds the lock of the job's name while it runs."""
    with local_store.locked(plan.name) as lock:
        if lock is None:
            hint = f"cancel it with `hp-ext cancel {plan.name}`, or use another name"
            raise ConflictError(f"a job named {plan.name} is running", hint=hint)
        _check_this_machine(plan.job)
        if (before := local_store.latest(plan.name)) is not None:
            local_watch.read_job_status(before, running=False)  # clean up if the engine was killed
        submission = local_store.create(plan.name)
        for name, text in {**plan.files, submission.job_file.name: plan.job.model_dump_json(indent=2) + "\n"}.items():
            write_atomically(submission.folder / name, text)
        _start_engine(submission, lock, str(plan.source_dir.resolve()))
    return JobHandle("local", "localhost", plan.name)


def list_jobs() -> list[JobStatus]:
    """Return the status of the newest submission of every local job."""
    return [_listed(JobHandle("local", "localhost", name)) for name in local_store.names()]


def _listed(handle: JobHandle) -> JobStatus:
    """Return the status of a job; `unknown` with the error if a file of the job is damaged.

    Raises no exception, so that `list_jobs` can list the other jobs.
    """
    try:
        return status(handle)
    except ConfigError as error:
        return JobStatus(handle.name, str(handle), "unknown", error=error.to_json())


def status(handle: JobHandle) -> JobStatus:
    """Return the status of the newest submission of the job."""
    submission = local_store.find(handle.name)
    return local_watch.read_job_status(submission, submission.is_running())


def watch(handle: JobHandle, with_lines: bool = False) -> Iterator[StatusUpdate]:
    """Yield an update ten times a second until the job has ended."""
    return local_watch.watch(local_store.find(handle.name), with_lines)


def logs(handle: JobHandle, rank: int | None = None, follow: bool = False) -> Iterator[str]:
    """Yield the log lines of all ranks, or of rank `rank`; with `follow`, until the job has ended."""
    submission = local_store.find(handle.name)
    handle.check_rank(rank, submission.read_job().world_size)
    return local_watch.follow_logs(submission, rank, follow)


def cancel(handle: JobHandle) -> JobStatus:
    """Send SIGTERM to the job's keeper, then wait until all processes of the job have ended.

    Nothing is sent if the job has already ended.
    """
    submission = local_store.find(handle.name)
    grace_s = submission.read_job().checkpoint.grace_s
    deadline = time.monotonic() + _CANCEL_TIMEOUT_S + grace_s
    # `submission` is an older, ended submission if a user removed the running submission's folder
    if submission.is_running() and not submission.has_ended():
        # the keeper may have been killed, and the keeper's pid file may have been removed with the job's folder
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int(submission.pid_file.read_text()), signal.SIGTERM)
    while submission.is_running():
        if time.monotonic() > deadline:
            raise HyperpodExtError(f"{handle.name} does not end", hint=f"see {submission.engine_log}")
        time.sleep(0.02)
    return status(handle)


def result(handle: JobHandle) -> Mapping[str, Any]:
    """Return the result of the job's newest submission, as the engine wrote it."""
    submission = local_store.find(handle.name)
    try:
        return EMPTY_REPORT | {"name": handle.name} | submission.read_result()
    except FileNotFoundError:
        raise handle.no_result() from None


def _start_engine(submission: local_store.Submission, lock: int, source_dir: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HPX_")}
    engine = "hyperpod_ext.jobs.local.engine"
    with open_private(submission.engine_log, "wb") as log:
        started = subprocess.run(
            [sys.executable, "-P", "-m", engine, str(submission.folder), str(lock)],
            env=inherited | {"HPX_SOURCE_DIR": source_dir, "HPX_PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C in this terminal must not stop the engine
            check=False,
        )
    if started.returncode != 0:
        raise HyperpodExtError("the local engine did not start", hint=submission.engine_log.read_text()[-2000:])


def _check_this_machine(job: JobConfig) -> None:
    """Raise an error if this machine lacks a package, or a free port, that every node of the job needs."""
    durable = job.checkpoint.durable()
    needed = [*(["cryptography"] if durable else []), *(["boto3"] if any(one.kind == "s3" for one in durable) else [])]
    if (missing := missing_packages("torch", "awscrt", *needed)) is not None:
        raise JobFailedError(f"{missing[0]} not installed in {sys.executable}", hint=missing[1])
    if port := job.rendezvous.port:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            hint = "set rendezvous.port to another port, or to 0 for any free port"
            raise ConflictError(f"port {port} cannot be used: {error.strerror}", hint=hint) from None


if TYPE_CHECKING:
    import hyperpod_ext.jobs.local.target as this_module

    _checked: Target = this_module
