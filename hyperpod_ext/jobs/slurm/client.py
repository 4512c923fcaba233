"""Runs Slurm's commands, such as squeue, returns their output as values, and raises an error if a command fails."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.errors import (
    ConfigError,
    HyperpodExtError,
    NotFoundError,
    Problem,
    UnknownOutcomeError,
    UnreachableError,
)

_TIMEOUT_S = 60.0
_TRIES = 4
_STATES = {
    "PENDING": "starting",
    "CONFIGURING": "starting",
    "REQUEUED": "starting",
    "REQUEUE_HOLD": "starting",
    "REQUEUE_FED": "starting",
    "RESV_DEL_HOLD": "starting",
    "SPECIAL_EXIT": "starting",
    "COMPLETED": "succeeded",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    "OUT_OF_MEMORY": "failed",
    "PREEMPTED": "failed",
    "TIMEOUT": "failed",
}
"""Slurm's job states, each with the state in `JobStatus`. A job in any other state of Slurm counts as running."""

_AWAY = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "slurm_load_jobs error",
)
_REFUSALS = (
    ("Invalid account", "slurm.account", "ask the cluster's administrator for an account that you can use"),
    ("Invalid qos", "scheduling.priority", "`sacctmgr show qos` lists them"),
    ("invalid partition", "scheduling.queue", "`sinfo` lists the partitions"),
    ("Invalid feature specification", "slurm.constraint", "`sinfo -o %f` lists the features of nodes"),
    ("Requested reservation is invalid", "slurm.reservation", "`scontrol show reservation` lists them"),
    ("Node count specification invalid", "nodes", "`sinfo` shows how many nodes a partition has"),
    ("Requested node configuration is not available", "resources", "`sinfo -N -l` shows the resources of nodes"),
    ("Invalid generic resource", "slurm.gres", "`sinfo -o %G` lists the generic resources of nodes"),
    ("Requested time limit is invalid", "timeouts.run_s", "`sinfo -o '%P %l'` shows the limits of partitions"),
    ("Invalid --time specification", "timeouts.run_s", "write a number of seconds within Slurm's limits"),
    (
        "unrecognized option",
        "slurm",
        "this Slurm does not know the option: write `auto_resume: false`, or change slurm.sbatch",
    ),
    ("Invalid node name", "slurm.exclude", "`sinfo -N` lists the nodes"),
)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job as Slurm reports it."""

    id: str
    state: str
    """State of the job in Slurm, such as `NODE_FAIL`."""
    submitted_at: str
    ended_at: str | None
    reason: str

    @property
    def our_state(self) -> str:
        """State of the job as a state of `JobStatus`, such as `failed`."""
        return _STATES.get(self.state, "running")


@dataclass(frozen=True, slots=True)
class Queued:
    """A job of this user that is in the queue or has just left the queue."""

    id: str
    submitted_at: str
    name: str
    comment: str
    folder: str
    """Folder from which the job was submitted."""


def submit(script: str, folder: Path) -> tuple[str, str]:
    """Submit the text `script` unchanged with sbatch, from `folder`; return the job's id and the cluster's name.

    Raises:
        UnknownOutcomeError: sbatch got no response from Slurm's controller, and no new job with this script was found
            in the queue.
    """
    known = _ids()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HPX_", "SBATCH_", "SLURM_JOB"))}
    try:
        output = _ask(
            ["sbatch", "--parsable"], cwd=folder, text=script, env=clean, tries=1
        )  # retrying sbatch could submit a second job
    except UnreachableError as error:
        return _queued_despite(error, script, known), cluster_name()
    return output.strip().splitlines()[-1].partition(";")[0], cluster_name()


def _ids() -> set[int]:
    """Return the ids of all jobs of this user that Slurm's controller knows. A job array counts as one job."""
    output = _ask(["squeue", "--noheader", "--me", "--states=all", "--format=%F"])
    return {int(word) for word in output.split() if word.isdecimal()}


def _queued_despite(error: UnreachableError, script: str, known: set[int]) -> str:
    """Return the id of the new job with this script, after sbatch got no response from the controller.

    sbatch is not called again, because a second call could submit a second job.

    Args:
        error: error of sbatch.
        known: ids of the jobs in the queue before the submission.
    """
    delay = 0.5
    for _ in range(_TRIES):  # a busy controller may still queue the job later
        try:
            new = sorted(_ids() - known)
            for job_id in map(str, new):
                if batch_script(job_id).strip() == script.strip():
                    return job_id
        except HyperpodExtError as other:
            hint = "`squeue --me` shows whether the job is queued; submit again if it is not listed"
            message = f"{error.message}; the job may have been queued anyway ({other.message})"
            raise UnknownOutcomeError(message, hint=hint) from None
        time.sleep(delay)
        delay *= 2
    hint = "the queue has no new job with this script yet; submit again if `squeue --me` still lists none"
    raise UnknownOutcomeError(f"{error.message}; the job may still be queued later", hint=hint)


def cluster_name() -> str:
    """Return the name of this machine's Slurm cluster."""
    match = re.search(r"^ClusterName\s*=\s*(\S+)", _ask(["scontrol", "show", "config"]), re.MULTILINE)
    return match[1] if match else "slurm"


def active_job(name: str) -> str | None:
    """Return the id of an active job of this user with the name `name`; None if there is none."""
    output = _ask(["squeue", "--noheader", "--me", f"--name={name}", "--format=%i"])
    return next(iter(output.split()), None)


def queued() -> list[Queued]:
    """Return all jobs of this user that Slurm's controller knows, including jobs that ended recently."""
    command = ["squeue", "--noheader", "--me", "--states=all", "--format=%i|%V|%j|%k|%Z"]
    lines = [line.split("|", 4) for line in _ask(command).splitlines()]
    # leave out tasks of job arrays, whose ids are not decimal numbers
    return [Queued(*parts) for parts in lines if len(parts) == 5 and parts[0].isdecimal()]


def batch_script(job_id: str) -> str:
    """Return the job's batch script, which Slurm stores until some time after the job has ended."""
    return _ask(["scontrol", "write", "batch_script", job_id, "-"])


def find(job_id: str) -> SlurmJob:
    """Return the job from Slurm's queue or, if the job has left the queue, from Slurm's accounting.

    Raises:
        NotFoundError: the job is neither in the queue nor in the accounting.
    """
    layout = "%i|%T|%V|%e|%r"
    try:
        if output := _ask(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--format={layout}"]).strip():
            return parse_queue(output.splitlines()[0])
    except NotFoundError:
        pass  # the job has left the queue, so ask the accounting next
    command = ["sacct", "-n", "-P", "-X", "-D", "-j", job_id, "-o", "JobID,State,Submit,End"]
    try:
        lines = _ask(command).splitlines()
    except HyperpodExtError:
        lines = []  # no lines, because the cluster has no accounting
    if not lines:
        raise NotFoundError(
            f"Slurm no longer lists job {job_id}", hint="`hp-ext logs` and `hp-ext report` still show the job"
        )
    return parse_accounting(lines[-1])


def parse_queue(line: str) -> SlurmJob:
    """Parse a line of squeue's output with the columns `id|state|submitted|ended|reason`."""
    job_id, state, submitted, ended, reason = line.split("|", 4)
    job = SlurmJob(job_id, state, submitted, None, "" if reason == "None" else reason)
    if job.our_state in ("starting", "running"):
        return job
    return SlurmJob(job_id, state, submitted, ended, job.reason)


def parse_accounting(line: str) -> SlurmJob:
    """Parse a line of sacct's output with the columns `id|state|submitted|ended`.

    The state may have more than one word, such as `CANCELLED by 1000`.
    """
    job_id, state, *times = line.split("|")
    submitted, ended = (*times, "", "")[:2]
    return SlurmJob(job_id, state.split()[0], submitted, ended or None, "")


def cancel(job_id: str) -> None:
    """Cancel the job. Slurm sends SIGTERM to the job's processes, and SIGKILL after the cluster's KillWait."""
    _ask(["scancel", "--quiet", job_id])


def task_states(array: str) -> frozenset[str]:
    """Return the states of the tasks of a job array, as states of `JobStatus`.

    The result is empty if Slurm no longer knows the array.
    """
    try:
        output = _ask(["squeue", "--noheader", "--states=all", f"--jobs={array}", "--format=%T"])
    except NotFoundError:
        return frozenset()
    return frozenset(_STATES.get(word, "running") for word in output.split())


def nodes_of(job_id: str) -> tuple[list[str], str]:
    """Return the names of a running job's nodes, and the name of the node that runs its batch script."""
    listed, _, first = _ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%N|%B"]).strip().partition("|")
    return _ask(["scontrol", "show", "hostnames", listed]).split(), first


def keep_nodes(job_id: str, hosts: Sequence[str]) -> None:
    """Shrink the allocation of a running job to the nodes `hosts`.

    Raises:
        ConfigError: Slurm on this cluster does not allow a running job to shrink.
    """
    try:
        _ask(["scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(hosts)}"], tries=1)
    except UnreachableError:
        raise
    except HyperpodExtError as error:
        hint = "an administrator can allow it; otherwise nodes are returned when the job ends"
        raise ConfigError([Problem(error.message, path="slurm", hint=hint)]) from None


def find_nodes(names: Sequence[str]) -> list[str]:
    """Return the names of all nodes in `names`, without repetitions.

    Args:
        names: names of nodes, or Slurm's expressions for several nodes, such as `gpu-[1-3]` for three nodes.

    Raises:
        NotFoundError: Slurm does not know one of the nodes.
    """
    wanted = list(dict.fromkeys(_ask(["scontrol", "show", "hostnames", ",".join(names)]).split()))
    known = set(_ask(["sinfo", "--noheader", "--Node", "--format=%N"]).split())
    if missing := [name for name in wanted if name not in known]:
        raise NotFoundError(f"Slurm has no node {', '.join(missing)}", hint="`sinfo -N` lists the nodes")
    return wanted


def jobs_on(names: Sequence[str]) -> list[str]:
    """Return the ids of the jobs that run on any of the nodes `names`."""
    return _ask(["squeue", "--noheader", f"--nodelist={','.join(names)}", "--states=R", "--format=%A"]).split()


def take_no_jobs(names: Sequence[str], reason: str | None) -> None:
    """Drain the nodes `names`, so that no new jobs start on these nodes, or resume the nodes.

    Args:
        reason: reason that Slurm shows for drained nodes; None means that the nodes are resumed.
    """
    state = ["State=RESUME"] if reason is None else ["State=DRAIN", f"Reason={reason}"]
    _ask(["scontrol", "update", f"NodeName={','.join(names)}", *state], tries=1)


def _ask(
    command: Sequence[str],
    cwd: Path | None = None,
    text: str = "",
    env: dict[str, str] | None = None,
    tries: int = _TRIES,
) -> str:
    """Run a command of Slurm and return its output. The command is retried if Slurm's controller does not answer.

    Args:
        cwd: current folder of the command; None: the folder of this process.
        text: standard input of the command.
        env: environment of the command; None: the environment of this process.
        tries: maximum number of runs.
    """
    delay = 0.5
    for attempt in range(tries):
        try:
            done = subprocess.run(
                command, input=text, capture_output=True, text=True, cwd=cwd, env=env, timeout=_TIMEOUT_S, check=False
            )
        except FileNotFoundError:
            hint = "run this command on the login or controller node of the cluster"
            raise UnreachableError(f"{command[0]} is not installed on this machine", hint=hint) from None
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"{command[0]} did not respond within {_TIMEOUT_S:.0f} s") from None
        if done.returncode == 0:
            return done.stdout
        error = explain(command[0], done.stderr or done.stdout)
        if not isinstance(error, UnreachableError) or attempt == tries - 1:
            raise error
        time.sleep(delay)
        delay *= 2
    raise AssertionError("unreachable")


def explain(command: str, output: str) -> HyperpodExtError:
    """Return the error for a failed command of Slurm.

    Args:
        command: name of the command.
        output: output of the command.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "no error message"
    if "Invalid job id" in output:
        return NotFoundError("Slurm has no such job", hint="`hp-ext list --target hyperpod-slurm` lists all")
    if "configuration source" in output:
        hint = "run this command on the login or controller node of the cluster, or set SLURM_CONF"
        return UnreachableError(f"{command} is installed, but has no configuration of a cluster", hint=hint)
    if any(words in output for words in _AWAY):
        return UnreachableError(f"{command}: {last}", hint="check with `scontrol ping` that the controller runs")
    for words, path, hint in _REFUSALS:
        if words.lower() in output.lower():
            return ConfigError([Problem(f"Slurm refuses the request: {' '.join(lines)}", path=path, hint=hint)])
    return HyperpodExtError(f"{command}: {' '.join(lines) or last}")
