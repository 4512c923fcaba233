"""The engine of one local job, started as `python -m hyperpod_ext.jobs.local.engine FOLDER LOCK_FD`.

The program does for a local job what a scheduler does on a cluster. The program runs as two processes, so that no
process of the job remains even if one of these two processes is killed with SIGKILL. The *engine* starts the nodes'
agents, and receives SIGTERM when the keeper dies. The *keeper* kills all remaining processes of the job when the engine
has ended. Engine and keeper both hold the lock of the job's name.

WARNING: engine and keeper fork. No module that this module imports may start a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.files import write_atomically
from hyperpod_ext.jobs.local.nodes import WANTED, Cancellation, GracePeriod, NodeCommand, Wanted, run_nodes
from hyperpod_ext.jobs.local.result import (
    EMPTY_REPORT,
    JobReport,
    NodeEnd,
    final_report,
    lost_result,
    make_result,
    without_supervisor,
)
from hyperpod_ext.jobs.local.store import Submission
from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import become_subreaper, describe_exit, die_with_parent, kill_descendants, wait_and_forward
from hyperpod_ext.scratch import Scratch, make_scratch
from hyperpod_ext.standard_streams import lose_unwritable_output

_TAIL_LINES = 20


def main(arguments: list[str]) -> int:
    """Start the keeper in the background, and return as soon as it runs.

    Args:
        arguments: folder of the submission, and descriptor of the lock.
    """
    # arguments[1] is not used: keeper and engine inherit the lock's descriptor, and so hold the lock
    submission = Submission(Path(arguments[0]))
    lose_unwritable_output()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # block SIGTERM until a handler is installed
    supervisor = os.fork()
    if supervisor:
        write_atomically(submission.pid_file, f"{supervisor}\n")
        return 0
    _keep(submission)
    return 0


def _keep(submission: Submission) -> None:
    """Start the engine, wait until it ends, then kill the job's remaining processes."""
    become_subreaper()
    supervisor = os.getpid()
    try:
        scratch = make_scratch()
    except OSError as error:
        _end_early(submission, f"a folder for sockets cannot be created in {tempfile.gettempdir()}: {error.strerror}")
        return
    try:
        engine = os.fork()
        if engine == 0:  # the engine, too, holds the lock of the job's name
            _run_and_exit(submission, scratch, supervisor)
        status = wait_and_forward(engine, signal.SIGTERM)
    finally:
        kill_descendants(supervisor)
        scratch.remove()
    if not submission.is_removed() and not submission.has_ended():
        _end_early(submission, f"the job's engine died: {describe_exit(status)}")


def _end_early(submission: Submission, message: str) -> None:
    """Write the result of a job whose engine failed.

    If the result cannot be written, the next command that reads the job's status writes it.
    """
    log, ends = str(submission.engine_log), submission.node_ends()
    try:
        submission.end(lost_result(submission.name, submission.handle, message, log, ends))
    except HyperpodExtError as error:
        sys.stderr.write(f"{error}\n")


def _run_and_exit(submission: Submission, scratch: Scratch, supervisor: int) -> None:
    code = 1
    try:
        cancellation = Cancellation()
        die_with_parent(supervisor, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        become_subreaper()
        _run_job(submission, scratch, cancellation, supervisor)
        code = 0
    except (HyperpodExtError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        _end_early(submission, str(error))
    except BaseException:  # write the traceback to engine.log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_job(submission: Submission, scratch: Scratch, cancellation: Cancellation, supervisor: int) -> None:
    job = json.loads(submission.job_file.read_text())
    secret = _secret_of(submission)
    undisturbed = None
    try:
        submission.write_status(state="running", scratch=str(scratch.path))
        main = _run_once(submission, "main", job, secret, scratch.path, cancellation)
        # no comparison in mode `run`: the second run would load the checkpoints of the first run
        compares = job["mode"] != "run" and (job["chaos"] or {}).get("compare")
        if main["state"] == "succeeded" and compares:
            with contextlib.suppress(HyperpodExtError):  # if the disk is full, keep the old status
                submission.write_status(state="comparing")
            undisturbed = _run_once(submission, "undisturbed", job, secret, scratch.path, cancellation)
    finally:
        kill_descendants(os.getpid())
        scratch.remove()
    if os.getppid() != supervisor:  # the death of the keeper has cancelled this run
        main = without_supervisor(main)
    if not submission.is_removed():
        submission.end(make_result(submission.name, submission.handle, main, undisturbed))


def _run_once(
    submission: Submission, run: str, job: Any, secret: Path, scratch: Path, cancellation: Cancellation
) -> JobReport:
    """Run all nodes of the job to their end; return the report of the run.

    Args:
        run: name of the run, either `main` or `undisturbed` (the comparison run without faults).
    """
    run_dir = submission.run_dir(run)
    shared = {
        "HPX_RDZV_ENDPOINT": f"127.0.0.1:{job['rendezvous']['port'] or free_port()}",
        "HPX_SECRET_FILE": str(secret),
        "HPX_SOCKET_DIR": str(scratch),
        "HPX_RUN_DIR": str(run_dir),
    }
    if run == "undisturbed":
        shared["HPX_CHAOS"] = "off"

    def node(number: int) -> NodeCommand:
        env = os.environ | shared | {"HPX_NODE_RANK": str(number)}
        return NodeCommand(("sh", str(submission.script)), env, run_dir / "logs" / f"node{number}.log")

    nodes = [node(number) for number in range(job["nodes"] + job["spares"])]
    ends: list[NodeEnd] = []

    def seen(end: NodeEnd) -> None:
        ends.append(end)
        submission.node_ended(end)

    comes_and_goes = job.get("elastic") or job["spares"]
    wanted = Wanted(run_dir / WANTED, run_dir / "report.json", node) if comes_and_goes else None
    exit_codes = run_nodes(nodes, cancellation, _grace_period(job), wanted, seen, submission.is_removed, _end_left)
    kill_descendants(os.getpid())
    failed = next((node for node, code in zip(nodes, exit_codes, strict=True) if code != 0), nodes[0])
    reports = {node: _read_json(run_dir / f"report.node{node}.json") for node in range(len(nodes))}
    words = {node: report["error"]["message"] for node, report in reports.items() if report and report["error"]}
    known = [report for report in (_read_json(run_dir / "report.json"), *reports.values()) if report]
    if not known and not any(exit_codes):
        known = _unwritten(run_dir)
    return final_report(next(iter(known), None), ends, cancellation.requested, _tail(failed.log), words)


def _end_left(agents: Collection[int]) -> None:
    """Kill the remaining processes of ended nodes: all descendants of the engine that belong to no running agent.

    Args:
        agents: process ids of the running agents.
    """
    kill_descendants(os.getpid(), spare=agents)


def _grace_period(job: Any) -> GracePeriod:
    """Return the time that the engine gives the agents to handle a lost node before it stops the job."""
    restart = job["restart"]
    waits_s = restart["lease_s"] + restart["node_wait_s"] if job["nodes"] + job["spares"] > 1 else 0.0
    restarts = restart["max_node_losses"] if job["nodes"] > 1 else 0
    needed = min(job["nodes"], job["elastic"]["min_nodes"]) if job.get("elastic") else job["nodes"]
    asking_s = GracePeriod().after_asking_s + (job["checkpoint"]["grace_s"] if _is_durable(job) else 0.0)
    return GracePeriod(node_wait_s=waits_s, after_asking_s=asking_s, needed=needed, restarts=restarts)


def _is_durable(job: Any) -> bool:
    """Return whether the job has a durable tier, to which stopped nodes upload their newest step."""
    return any(tier["kind"] not in ("memory", "peer") for tier in job["checkpoint"]["tiers"])


def _secret_of(submission: Submission) -> Path:
    """Return the file of the job's secret, which signs its checkpoints. The file is created if it does not exist.

    All submissions with the same name use the same secret.
    """
    file = submission.folder.parent / "secret"
    partial = submission.folder / "secret.partial"
    write_atomically(partial, secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):  # keep the secret of an earlier submission
        os.link(partial, file)  # `link` creates the file atomically
    partial.unlink()
    return file


def _read_json(file: Path) -> JobReport | None:
    """Read a report of the job or of a stopped node; return None if the file is missing or truncated."""
    try:
        report: JobReport = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return report


def _unwritten(run_dir: Path) -> list[JobReport]:
    """Return a report for a job whose exit codes show success, but whose agents could not write a report.

    Return an empty list if the run folder can be written, because the report is then missing for another reason.
    """
    probe = run_dir / "probe"
    try:
        write_atomically(probe, "")
        probe.unlink()
    except OSError as error:
        why = f"{run_dir / 'report.json'} could not be written: {error.strerror}; the result has no numbers"
        return [EMPTY_REPORT | {"state": "succeeded", "warnings": [why]}]
    return []


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"{log} cannot be read: {error.strerror}"
    return "\n".join(lines[-_TAIL_LINES:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
