"""Target `hyperpod-slurm`: runs a job as one sbatch file, on any Slurm cluster.

On a HyperPod cluster, HyperPod resumes the job's step automatically after a node failure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConflictError, HyperpodExtError, NotFoundError, UnreachableError
from hyperpod_ext.jobs.contract import records
from hyperpod_ext.jobs.contract.capabilities import Capabilities
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate
from hyperpod_ext.jobs.contract.targets import running_node
from hyperpod_ext.jobs.job_files.job_report import SlurmRecord
from hyperpod_ext.jobs.slurm import client as slurm
from hyperpod_ext.jobs.slurm import runs
from hyperpod_ext.jobs.slurm.script import COMMENT, job_script, spec_in
from hyperpod_ext.jobs.slurm.script import problems as problems
from hyperpod_ext.jobs.slurm.script import warnings as warnings

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.jobs.contract.plan_type import Plan
    from hyperpod_ext.jobs.contract.targets import Target

NAME = "hyperpod-slurm"
PARTS = {
    "move": "hyperpod_ext.jobs.slurm.move",
    "resize": "hyperpod_ext.jobs.slurm.resize",
    "shell": "hyperpod_ext.jobs.slurm.target",
}
INSTEAD = {
    "leftovers": "Slurm deletes old jobs itself; their files are in the folder that `hp-ext status` shows",
    "ports": "use `ssh -L HERE:HOST:THERE` to the host that `squeue` shows",
}
FILE = "job.sbatch"
_TICK_S = 0.2
_ASK_EVERY_S = 2.0
"""Seconds between requests to Slurm. Requests are rare because all users of the cluster share Slurm's controller."""
_CANCEL_TIMEOUT_S = 120.0
MORE = "nodes.jobs"
"""File in a job's folder with the ids of the Slurm job arrays that add nodes to the job."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submission of a job to Slurm."""

    name: str
    id: str
    cluster: str
    folder: Path
    """Folder from which the job was submitted."""
    runs: str
    world_size: int
    submitted_at: str

    @property
    def job_dir(self) -> Path:
        return self.folder / self.runs / self.name / self.id

    @property
    def batch_log(self) -> Path:
        return self.folder / f"{self.name}-{self.id}.out"


def capabilities() -> Capabilities:
    """Return the capabilities of target `hyperpod-slurm`."""
    return Capabilities(
        orchestrator="slurm",
        image=True,
        process_restart=True,
        spares=True,
        elastic=True,
        command=True,
        reads=frozenset(
            {
                "working_dir",
                "resources",
                "scheduling",
                "volumes",
                "relaunch",
                "timeouts",
                "slurm",
                "metrics",
                "network",
                "log_rules",
            }
        ),
    )


def render(job: JobConfig, cluster: ClusterConfig | None) -> dict[str, str]:
    """Return the file `job.sbatch`."""
    del cluster  # no cluster is needed, because Slurm knows the nodes
    return {FILE: job_script(job)}


def submit(plan: Plan) -> JobHandle:
    """Submit the file with sbatch.

    Raises:
        ConflictError: a job of this name is in the queue.
        ConfigError: Slurm refuses the job.
        UnreachableError: Slurm is not installed on this machine, or does not respond.
    """
    if (other := slurm.active_job(plan.name)) is not None:
        hint = f"cancel it with `scancel {other}`, or use another name"
        raise ConflictError(f"job {other} of the queue already has the name {plan.name}", hint=hint)
    folder = plan.source_dir.resolve()
    job_id, cluster = slurm.submit(plan.files[FILE], folder)
    record = {
        "id": job_id,
        "cluster": cluster,
        "folder": str(folder),
        "runs": plan.job.slurm.runs,
        "world_size": plan.world_size,
        "submitted_at": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    records.remember(NAME, plan.name, record)
    return JobHandle(NAME, cluster, plan.name)


def list_jobs() -> list[JobStatus]:
    """Return the status of the newest submission of every job name, including submissions from other machines.

    The state of a job is `unknown` if Slurm does not respond.

    Raises:
        UnreachableError: Slurm does not respond, and this machine has submitted no jobs.
    """
    found = []
    known = {name: str(records.recall(NAME, name, SlurmRecord)["cluster"]) for name in records.names(NAME)}
    try:
        elsewhere = [name for name in _newest_of_ours() if name not in known]
        known |= dict.fromkeys(elsewhere, slurm.cluster_name() if elsewhere else "")
    except UnreachableError:
        if not known:  # if Slurm does not respond, list the submissions of this machine
            raise
    for name, cluster in sorted(known.items()):
        handle = JobHandle(NAME, cluster, name)
        try:
            found.append(status(handle))
        except (UnreachableError, NotFoundError) as error:
            found.append(JobStatus(name=name, handle=str(handle), state="unknown", error=error.to_json()))
    return found


def status(handle: JobHandle) -> JobStatus:
    """Return the status of the newest submission with the handle's name.

    If Slurm no longer knows the job, the state is read from the job's report.
    """
    job = submission(handle)
    try:
        known = slurm.find(job.id)
        state, submitted, ended, reason = known.our_state, known.submitted_at, known.ended_at, known.reason
        word = known.state
    except NotFoundError:
        reported = runs.reported_state(job.job_dir)
        if reported is None:
            raise
        word, state, submitted, ended, reason = reported, reported, job.submitted_at, None, ""
    if state == "failed" and runs.reported_state(job.job_dir) == "cancelled":
        state = "cancelled"  # Slurm reports a job that ended after SIGTERM as failed
    error = None
    if state == "failed":
        cause = f"job {job.id} is {word}" + (f" ({reason})" if reason else "")
        error = runs.make_result(job.job_dir, job.batch_log, state, cause)["error"]
    step = runs.newest_step(job.job_dir)
    return JobStatus(
        name=job.name,
        handle=str(handle),
        state=state,
        step=step.get("step"),
        of=step.get("of"),
        submitted_at=submitted,
        ended_at=ended,
        error=error,
        folder=str(job.job_dir),
    )


def watch(handle: JobHandle, with_lines: bool = False) -> Iterator[StatusUpdate]:
    """Yield updates several times a second until the job has ended. Slurm is queried only every two seconds."""
    job = submission(handle)
    reader = runs.JobReader(job.job_dir, job.batch_log)
    now = status(handle)
    asked = time.monotonic()
    while True:
        yield StatusUpdate(now, tuple(reader.events()), tuple(reader.lines()) if with_lines else ())
        if now.ended:
            return
        time.sleep(_TICK_S)
        if time.monotonic() - asked >= _ASK_EVERY_S:
            now, asked = status(handle), time.monotonic()


def logs(handle: JobHandle, rank: int | None = None, follow: bool = False) -> Iterator[str]:
    """Yield the log lines of batch script, nodes and ranks, from all starts of the job.

    Args:
        rank: yield only lines of this rank; None yields all lines.
        follow: wait for new lines until the job has ended.
    """
    job = submission(handle)
    handle.check_rank(rank, job.world_size)
    reader = runs.JobReader(job.job_dir, job.batch_log, rank)
    ended, asked = not follow, time.monotonic()
    while True:
        yield from reader.lines()
        if ended:
            return
        time.sleep(_TICK_S)
        if time.monotonic() - asked >= _ASK_EVERY_S:  # the loop reads once more after the job's end
            ended, asked = status(handle).ended, time.monotonic()


def cancel(handle: JobHandle) -> JobStatus:
    """Run scancel, then wait until the job has ended. scancel is not run if the job has already ended."""
    job = submission(handle)
    deadline = time.monotonic() + _CANCEL_TIMEOUT_S
    asked = False
    while not (now := status(handle)).ended:
        if not asked:
            for one in (*more_jobs(job.job_dir), job.id):
                with suppress(NotFoundError):  # ignore a job that Slurm no longer knows
                    slurm.cancel(one)
            asked = True
        if time.monotonic() > deadline:
            raise HyperpodExtError(f"{handle.name} does not end", hint=f"`scontrol show job {job.id}` shows why")
        time.sleep(_TICK_S)
    return now


def result(handle: JobHandle) -> Mapping[str, Any]:
    """Return the report of the job's last start, with the losses of all starts.

    Raises:
        NotFoundError: the job has not ended.
    """
    job, now = submission(handle), status(handle)
    if not now.ended:
        raise handle.no_result()
    found = runs.make_result(job.job_dir, job.batch_log, now.state, f"job {job.id} is {now.state}")
    about = {"name": job.name, "target": NAME, "handle": str(handle), "slurm_job_id": job.id}
    if now.error is not None:  # prefer the error of `status`, which names the job's state in Slurm
        found = found | {"error": now.error}
    return found | about


def exec_command(handle: JobHandle, node: int, words: Sequence[str], terminal: bool) -> list[str]:
    """Return the srun command that runs `words` on a node of the job, as `targets.Shell` defines it."""
    job = submission(handle).id
    running = slurm.nodes_of(job)[0] if status(handle).state == "running" else []
    host = running_node(handle, running, node)
    step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
    return [*step, *(["--pty"] if terminal else []), *words]


def _record(name: str) -> Mapping[str, Any]:
    """Return the record of the newest submission of `name`.

    If this machine has no record, a record is made from the newest job with this name in Slurm's queue.
    """
    try:
        return records.recall(NAME, name, SlurmRecord)
    except NotFoundError:
        with suppress(UnreachableError):
            if queued := _newest_of_ours().get(name):
                return _record_of(queued)
        raise


def more_jobs(job_dir: Path) -> list[str]:
    """Return the ids of the Slurm job arrays whose nodes have joined the job or will join it.

    Args:
        job_dir: the job's folder, RUNS/NAME/JOBID.
    """
    file = job_dir / MORE
    return file.read_text().split() if file.exists() else []


def submission(handle: JobHandle) -> Submitted:
    """Return the newest submission with the handle's name."""
    record = _record(handle.name)
    fields = {name: record[name] for name in SlurmRecord.model_fields}
    return Submitted(handle.name, **fields | {"folder": Path(record["folder"])})


def _newest_of_ours() -> dict[str, slurm.Queued]:
    """Return the newest Slurm job of each name that this user submitted with hp-ext, from any machine."""
    found: dict[str, slurm.Queued] = {}
    for queued in sorted(slurm.queued(), key=lambda one: int(one.id)):
        if queued.comment == COMMENT:
            found[queued.name] = queued
    return found


def _record_of(queued: slurm.Queued) -> dict[str, Any]:
    """Make the record of a job that another machine submitted, from the batch script that Slurm stores.

    Raises:
        NotFoundError: Slurm does not return the batch script, or the script has no spec that this version can read.
    """
    try:
        text = slurm.batch_script(queued.id)
    except HyperpodExtError as error:
        hint = f"run this command on the machine that submitted it, or see `scontrol show job {queued.id}`"
        raise NotFoundError(f"the batch script of job {queued.id} cannot be read: {error.message}", hint=hint) from None
    if (job := spec_in(text)) is None:
        message = (
            f"the spec of job {queued.id} cannot be read: its batch script was edited, or another version wrote it"
        )
        raise NotFoundError(message, hint="run this command on the machine that submitted the job")
    return {
        "id": queued.id,
        "cluster": slurm.cluster_name(),
        "folder": str(Path(queued.folder)),
        "runs": job.slurm.runs,
        "world_size": job.world_size,
        "submitted_at": queued.submitted_at,
    }


if TYPE_CHECKING:
    import hyperpod_ext.jobs.slurm.target as this_module

    _checked: Target = this_module
