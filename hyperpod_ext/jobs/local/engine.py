"""The engine of one local job: `python -m hyperpod_ext.jobs.local.engine FOLDER LOCK_FD`.

The program is the scheduler. It consists of two processes, so that no process remains even if one of them gets SIGKILL.
The *engine* runs the nodes, and gets SIGTERM when the keeper dies. The *keeper* kills all remaining processes when the
engine has ended. Engine and keeper both hold the lock of the job's name.

WARNING: both fork. Nothing imported here may start a thread.
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
from hyperpod_ext.processes import become_subreaper, describe_exit, die_with_parent, kill_descendants
from hyperpod_ext.scratch import Scratch, make_scratch
from hyperpod_ext.standard_streams import lose_unwritable_output

_TAIL_LINES = 20


def main(arguments: list[str]) -> int:
    """Start the keeper in the background. When this process exits, the keeper runs."""
    # arguments[1] is the descriptor of the lock, which all processes inherit
    submission = Submission(Path(arguments[0]))
    lose_unwritable_output()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the handler is installed
    supervisor = os.fork()
    if supervisor:
        write_atomically(submission.pid_file, f"{supervisor}\n")
        return 0
    _keep(submission)
    return 0


def _keep(submission: Submission) -> None:
    """Wait for the engine, then kill the job's remaining processes."""
    become_subreaper()
    supervisor = os.getpid()
    try:
        scratch = make_scratch()
    except OSError as error:
        _end_early(submission, f"a folder for sockets cannot be created in {tempfile.gettempdir()}: {error.strerror}")
        return
    try:
        engine = os.fork()
        if engine == 0:  # the child inherits the lock, so the name is free when both have ended
            _run_and_exit(submission, scratch, supervisor)
        signal.signal(signal.SIGTERM, lambda _signum, _frame: _ask_to_end(engine))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _, status = os.waitpid(engine, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        kill_descendants(supervisor)
        scratch.remove()
    if not submission.is_removed() and not submission.has_ended():
        _end_early(submission, f"the job's engine died: {describe_exit(status)}")


def _end_early(submission: Submission, message: str) -> None:
    """Write the result of a job whose engine failed. If that is impossible, readers report it."""
    log, ends = str(submission.engine_log), submission.node_ends()
    try:
        submission.end(lost_result(submission.name, submission.handle, message, log, ends))
    except HyperpodExtError as error:
        sys.stderr.write(f"{error}\n")


def _ask_to_end(engine: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has just ended
        os.kill(engine, signal.SIGTERM)


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
    except BaseException:  # engine.log gets the traceback; the keeper gets the exit code
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
        # a script that loads its own checkpoints would continue from those of the first run
        compares = job["mode"] != "run" and (job["chaos"] or {}).get("compare")
        if main["state"] == "succeeded" and compares:
            with contextlib.suppress(HyperpodExtError):  # the disk is full
                submission.write_status(state="comparing")
            undisturbed = _run_once(submission, "undisturbed", job, secret, scratch.path, cancellation)
    finally:
        kill_descendants(os.getpid())
        scratch.remove()
    if os.getppid() != supervisor:  # the keeper's death, not a user, has cancelled this run
        main = without_supervisor(main)
    if not submission.is_removed():
        submission.end(make_result(submission.name, submission.handle, main, undisturbed))


def _run_once(
    submission: Submission, run: str, job: Any, secret: Path, scratch: Path, cancellation: Cancellation
) -> JobReport:
    """Run all nodes: `main`, or `undisturbed` without faults."""
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
    """Kill all processes of ended nodes: all descendants that do not belong to a running agent."""
    kill_descendants(os.getpid(), spare=agents)


def _grace_period(job: Any) -> GracePeriod:
    """Return the seconds in which agents may handle a lost node without the engine."""
    restart = job["restart"]
    waits_s = restart["lease_s"] + restart["node_wait_s"] if job["nodes"] + job["spares"] > 1 else 0.0
    restarts = restart["max_node_losses"] if job["nodes"] > 1 else 0
    needed = min(job["nodes"], job["elastic"]["min_nodes"]) if job.get("elastic") else job["nodes"]
    asking_s = GracePeriod().after_asking_s + (job["checkpoint"]["grace_s"] if _is_durable(job) else 0.0)
    return GracePeriod(node_wait_s=waits_s, after_asking_s=asking_s, needed=needed, restarts=restarts)


def _is_durable(job: Any) -> bool:
    """Return whether stopped nodes upload their newest step to a durable tier. This takes up to the grace period."""
    return any(tier["kind"] not in ("memory", "peer") for tier in job["checkpoint"]["tiers"])


def _secret_of(submission: Submission) -> Path:
    """Return the job's secret, which signs its checkpoints. All submissions of the name share it."""
    file = submission.folder.parent / "secret"
    partial = submission.folder / "secret.partial"
    write_atomically(partial, secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):  # keep the secret of an earlier submission
        os.link(partial, file)  # atomic
    partial.unlink()
    return file


def _read_json(file: Path) -> JobReport | None:
    """Read a report of the job or of a stopped node; None if it is missing or cut off."""
    try:
        report: JobReport = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return report


def _unwritten(run_dir: Path) -> list[JobReport]:
    """Return the report of a job that succeeded, by its exit codes, but could not write one."""
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
