"""Resizes a running job on Slurm.

To remove nodes, a request is written to the run folder, and nodes that have left the job are released to Slurm. To add
nodes, an array of Slurm jobs with one node each is submitted. Each Slurm job of the array writes the request when it
starts, and ends when its node leaves the job. Slurm's own expansion of allocations is not used, because most clusters
disable expansion.

RUNS/NAME/JOBID/nodes.jobs       ids of the job arrays that added nodes, one per line
RUNS/NAME/JOBID/0.0/hosts/3      Slurm's name of node 3, if it is in the job's original allocation
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.resize import LEFT, ResizeOrder
from hyperpod_ext.counts import count
from hyperpod_ext.errors import ConfigError, ConflictError, NotFoundError, Problem, UnsupportedError
from hyperpod_ext.files import write_atomically
from hyperpod_ext.jobs.contract import resize
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.render import check_shell
from hyperpod_ext.jobs.contract.run_files import Tail, read_event
from hyperpod_ext.jobs.slurm import client as slurm
from hyperpod_ext.jobs.slurm import runs as hyperpod_slurm_runs
from hyperpod_ext.jobs.slurm import target as hyperpod_slurm
from hyperpod_ext.jobs.slurm.script import nodes_script, spec_in

Answer = TypeVar("Answer")
_ASK_EVERY_S = 2.0
_ENDED_BADLY = frozenset({"failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class PendingResize:
    """A request to resize a running job on Slurm."""

    job: hyperpod_slurm.Submitted
    spec: JobConfig
    start: Path
    """Run folder of the job's current start, in which the request is written."""
    name: str
    nodes: int
    of: int
    """Number of nodes at the time of the request."""
    events: Tail
    """Reader of the job's events that follow the request."""
    joining: str = ""
    """Id of the array of Slurm jobs that adds nodes; empty if the resize adds no nodes."""

    @property
    def note(self) -> str:
        """Sentence for the user about added nodes that wait in Slurm's queue; empty if the resize adds no nodes."""
        if not self.joining:
            return ""
        more = count(self.nodes - self.of, "more node")
        return f"job {self.joining} of the queue adds {more}; training continues meanwhile"


def order(handle: JobHandle, nodes: int) -> PendingResize:
    """Request a resize to `nodes` nodes. If the job needs more nodes, also request them from Slurm.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: the job is not training, already has this size, or waits for nodes.
        ConfigError: the spec does not allow this number of nodes, or Slurm refuses the additional nodes.
    """
    job = hyperpod_slurm.submission(handle)
    spec = spec_of(job)
    if spec.mode != "ours":
        hint = "submit the job again with other `nodes`, or use mode ours, in which running jobs can be resized"
        raise UnsupportedError([Problem(f"jobs of mode {spec.mode} cannot be resized", path="mode", hint=hint)])
    if problem := resize.refusal(spec, nodes):
        raise ConfigError([problem])
    start = training_start(job, handle)
    if waiting := [one for one in hyperpod_slurm.more_jobs(job.job_dir) if slurm.task_states(one) & {"starting"}]:
        hint = f"wait for them, or cancel the request with `scancel {waiting[0]}`"
        raise ConflictError(
            f"{job.name} already waits for nodes of an earlier resize, job {waiting[0]} of the queue", hint=hint
        )
    events = Tail(start / "events.jsonl")
    job_nodes = resize.nodes_of_job(read_event(line) for line in events.lines())
    if nodes == job_nodes.size:
        raise ConflictError(f"{job.name} already has {count(nodes, 'node')}")
    name = resize.new_name()
    joining = numbers_for(spec, nodes, job_nodes)
    arriving = ""
    if joining:
        arriving = _send_for(job, spec, name, ResizeOrder(nodes=nodes, joining=joining))
    else:
        resize.leave_order(start, name, ResizeOrder(nodes=nodes))
    return PendingResize(job, spec, start, name, nodes, job_nodes.size, events, arriving)


def training_start(job: hyperpod_slurm.Submitted, handle: JobHandle) -> Path:
    """Return the run folder of a training job's latest start.

    Raises:
        ConflictError: the job is not training.
        UnsupportedError: another version of hp-ext submitted the job.
    """
    starts = hyperpod_slurm_runs.starts(job.job_dir)
    if not runs(job) or not starts or not (starts[-1] / "events.jsonl").exists():
        raise ConflictError(f"{job.name} is not training", hint=f"`hp-ext status {handle}` shows its progress")
    if not (starts[-1] / "hosts").is_dir():
        hint = "submit the job again with this version, whose jobs can be resized"
        raise UnsupportedError([Problem(f"{job.name} was submitted by another version of hp-ext", hint=hint)])
    return starts[-1]


def numbers_for(spec: JobConfig, nodes: int, job_nodes: resize.JobNodes) -> tuple[int, ...]:
    """Return the node numbers for the nodes that must join before the job can run on `nodes` nodes plus spares. Pure.

    The numbers are the highest free numbers, because each start of the job gives the lowest numbers to the nodes of its
    original allocation.
    """
    most = max(spec.nodes, spec.elastic.max_nodes if spec.elastic else 0) + spec.spares
    missing = max(0, nodes + spec.spares - len(job_nodes.members)) if nodes > job_nodes.size else 0
    free = sorted(set(range(most)) - job_nodes.members)
    return tuple(free[len(free) - missing :]) if missing else ()


def outcome(ordered: PendingResize, timeout_s: float | None) -> dict[str, Any]:
    """Wait until the job has carried out the request, then return to Slurm the nodes that have left the job.

    Args:
        timeout_s: maximum seconds to wait; None waits without a limit.

    Raises:
        ConflictError: the request was refused, the job ended first, or joining nodes failed.
        WaitTimeoutError: the request takes longer than `timeout_s`.
    """
    unasked, ended = ordered.nodes if ordered.joining else None, seldom(lambda: _why_not(ordered))
    done = resize.outcome(ordered.job.name, ordered.events, ordered.name, ended, timeout_s, unasked)
    return done | give_back(ordered, done)


def _why_not(ordered: PendingResize) -> str:
    job = ordered.job
    if not runs(job):
        return f"{job.name} ended or was requeued before it was resized"
    if ordered.joining and (bad := slurm.task_states(ordered.joining) & _ENDED_BADLY):
        return f"a joining node has {min(bad)}: see {job.folder}/{job.name}.nodes-{ordered.joining}_*.out"
    return ""


def give_back(ordered: PendingResize, done: dict[str, Any]) -> dict[str, Any]:
    """Release the nodes that have left the job, but are still in its original allocation, to Slurm.

    Args:
        done: the coordinator's event about the resize or move.

    Returns:
        The fields `given_back` (released nodes), `kept` (nodes that have left the job but stay in the allocation) and
        `why_kept` (reason why they stay).
    """
    start, job = ordered.start, ordered.job
    hosts = hosts_of(start)
    if done["nodes"] < done["of"]:
        _wait_for_departing(ordered, hosts)
    held, first = slurm.nodes_of(job.id)
    left = [hosts[number] for number in sorted(hosts) if (start / LEFT.format(number)).exists()]
    gone = [host for host in left if host in held and host != first]
    result: dict[str, Any] = {"given_back": [], "kept": [host for host in left if host == first and host in held]}
    if result["kept"]:
        result["why_kept"] = "the batch script runs on it"
    if not gone:
        return result
    try:
        slurm.keep_nodes(job.id, [host for host in held if host not in gone])
    except ConfigError as error:
        return result | {"kept": [*result["kept"], *gone], "why_kept": error.problems[0].message}
    return result | {"given_back": gone}


def hosts_of(start: Path) -> dict[int, str]:
    """Return Slurm's name of each node of the job's original allocation, by the node's number.

    Args:
        start: run folder of the job's current start.
    """
    return {int(file.name): file.read_text().strip() for file in (start / "hosts").iterdir()}


def _wait_for_departing(ordered: PendingResize, hosts: dict[int, str]) -> None:
    """Wait until the departing nodes of the job's original allocation have saved their checkpoints and ended.

    Args:
        hosts: Slurm's name of each node of the original allocation, by the node's number.

    Raises:
        HyperpodExtError: the agent of a departing node does not end.
    """
    events = [read_event(line) for line in Tail(ordered.start / "events.jsonl").lines()]
    begun = [one for one in events if one.get("event") == "resize_begun" and one["order"] == ordered.name]
    leaving = {number: hosts[number] for number in (begun[-1]["leaving"] if begun else ()) if number in hosts}
    resize.wait_until_left(ordered.spec, ordered.start, leaving, seldom(lambda: runs(ordered.job)))


def seldom(ask: Callable[[], Answer]) -> Callable[[], Answer]:
    """Return a function that returns the result of `ask`, and calls `ask` at most every two seconds.

    Callers can call the function often without sending many requests to Slurm. `ask` runs a command of Slurm.
    """
    newest: list[tuple[float, Answer]] = []

    def kept() -> Answer:
        if not newest or time.monotonic() - newest[0][0] >= _ASK_EVERY_S:
            newest[:] = [(time.monotonic(), ask())]
        return newest[0][1]

    return kept


def runs(job: hyperpod_slurm.Submitted) -> bool:
    """Return whether Slurm runs the job now."""
    return slurm.find(job.id).our_state == "running"


def _send_for(job: hyperpod_slurm.Submitted, spec: JobConfig, name: str, order: ResizeOrder) -> str:
    """Submit an array of Slurm jobs, with one node for each number in `order.joining`; return the array's id.

    Args:
        name: name of the resize request.
        order: content of the resize request.
    """
    script = nodes_script(spec, job.id, name, order.joining, order.model_dump_json(), job.folder)
    check_shell("nodes.sbatch", script)
    array, _ = slurm.submit(script, job.folder)
    write_atomically(
        job.job_dir / hyperpod_slurm.MORE,
        "".join(f"{one}\n" for one in (*hyperpod_slurm.more_jobs(job.job_dir), array)),
    )
    return array


def spec_of(job: hyperpod_slurm.Submitted) -> JobConfig:
    """Return the spec in the job's batch script.

    Raises:
        ConflictError: the job has not started yet.
        NotFoundError: the file has no spec that this version can read.
    """
    try:
        spec = spec_in((job.job_dir / "job.sbatch").read_text())
    except FileNotFoundError:
        raise ConflictError(f"{job.name} has not started yet", hint=f"`squeue -j {job.id}` shows why") from None
    if spec is None:
        hint = "the file was edited, or another version of hp-ext wrote it; submit the job again"
        raise NotFoundError(f"{job.job_dir}/job.sbatch has no readable spec", hint=hint)
    return spec
