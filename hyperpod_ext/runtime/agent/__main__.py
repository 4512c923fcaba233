"""`python -m hyperpod_ext.runtime.agent [flags] -- script.py [args]`: run one node of a job."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.files import make_private_folder
from hyperpod_ext.processes import collect_seldom, take_signals_from
from hyperpod_ext.runtime.agent import last_word
from hyperpod_ext.runtime.agent.coordinator_client import ExcludedError
from hyperpod_ext.runtime.agent.node import Node
from hyperpod_ext.runtime.agent.settings import parse, read_settings
from hyperpod_ext.runtime.coordinator.resize_orders import tell_here, tell_left
from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.log import REPORT, report_of, report_on, write_report
from hyperpod_ext.runtime.events.report import make_report
from hyperpod_ext.runtime.ipc.environment import ENV_RUN_DIR, ENV_SOCKET_DIR
from hyperpod_ext.scratch import scratch_folder
from hyperpod_ext.standard_streams import lose_unwritable_output

_LEFT_FOR_NOW = "left for now"
"""Final state of a node that has left a job which continues without the node. The node may join the job again."""
_EXIT_CODES = {
    "succeeded": 0,
    "left": 0,
    # use the exit code of a process that SIGTERM ended, because the launcher would not restart the agent after exit
    # code 0
    _LEFT_FOR_NOW: 143,
    "failed": JobFailedError.exit_code,
    "cancelled": 130,
}


def main() -> None:
    lose_unwritable_output()
    arguments = parse(sys.argv[1:])
    run_dir = Path(os.environ.get(ENV_RUN_DIR, "hpx-run"))
    last_word.keep("")
    # this handler is used only until `Node` installs its own SIGTERM handler
    signal.signal(signal.SIGTERM, _end)
    try:
        with _disk_errors():
            _prepare(run_dir, arguments)
            with socket_dir() as private:
                try:
                    state, why, hint = _run(arguments, run_dir, private)
                finally:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ignore SIGTERM while the node cleans up
    except HyperpodExtError as error:
        last_word.say(f"node {arguments.node_rank}: {error}")
        last_word.keep(error.message, error.hint, arguments.node_rank)
        with contextlib.suppress(OSError):
            _report(error, arguments, run_dir)
        sys.exit(error.exit_code)
    if state == "left":
        tell_left(run_dir, arguments.node_rank)
    elif state != _LEFT_FOR_NOW:
        for warning in _report_in(run_dir).get("warnings") or ():
            last_word.say(f"node {arguments.node_rank}: warning: {warning}")
    if state == "failed":
        last_word.say(f"node {arguments.node_rank}: {last_word.of_failed_job(why, hint)}")
    sys.exit(_EXIT_CODES[state])


def _prepare(run_dir: Path, arguments: argparse.Namespace) -> None:
    make_private_folder(run_dir)
    if arguments.node_rank == 0 and not arguments.rejoin:
        for report in (REPORT, *(path.name for path in run_dir.glob(report_of("*")))):
            (run_dir / report).unlink(missing_ok=True)  # delete reports of an earlier run in the same directory
    tell_here(run_dir, arguments.node_rank)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Convert an OSError that names a file to a JobFailedError. An OSError without a file name is a bug, and is raised
    unchanged."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise JobFailedError(
            f"{error.filename}: {error.strerror}",
            hint="The node needs this file: give its user write access, and check that the disk has free space.",
        ) from error


def _end(_signum: int, _frame: FrameType | None) -> None:
    sys.exit(_EXIT_CODES["cancelled"])


def _report_in(run_dir: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads((run_dir / REPORT).read_text())
    except (OSError, ValueError):
        return {}
    return report


def _report(error: HyperpodExtError, arguments: argparse.Namespace, run_dir: Path) -> None:
    """Write this node's error to the node's own report file. If the job has no report yet, node 0 also writes the error
    to the job's report."""
    node, log = arguments.node_rank, run_dir / "events.jsonl"
    world_size = arguments.nnodes * arguments.nproc_per_node
    why = error.to_json()
    if not error.message.startswith(f"node {node} "):
        why |= {"message": f"node {node}: {error.message}"}
    if log.exists():
        report = report_on(log, state="failed", error=why, world_size=world_size)
        write_report(run_dir, report, report_of(node))
    if node == 0 and not arguments.rejoin and not (run_dir / REPORT).exists() and not isinstance(error, ExcludedError):
        made = make_report(Events(), state="failed", error=error.to_json(), world_size=world_size)
        write_report(run_dir, report if log.exists() else made)


@contextlib.contextmanager
def socket_dir() -> Iterator[Path]:
    """Yield a private directory for sockets: the directory in `HPX_SOCKET_DIR` if it is set, otherwise a temporary
    directory."""
    if ENV_SOCKET_DIR in os.environ:
        yield Path(os.environ[ENV_SOCKET_DIR])
        return
    with scratch_folder() as private:
        yield private


def _run(arguments: argparse.Namespace, run_dir: Path, private: Path) -> tuple[str, str, str]:
    """Run the node. Returns the final state of the job, why the job failed, and a hint. The reason and the hint are
    empty if the job did not fail."""
    settings = read_settings(arguments, run_dir, private)
    collect_seldom()

    async def run() -> tuple[str, str, str]:
        node = Node(settings)
        try:
            state = await node.run()
            if state == "left" and node.asked_to_leave and settings.config.elastic is None:
                state = _LEFT_FOR_NOW
        finally:
            # ignore SIGTERM from now on, because this node is shutting down already
            take_signals_from(asyncio.get_running_loop(), signal.SIG_IGN)
        return state, *node.why_failed

    return asyncio.run(run())


if __name__ == "__main__":
    main()
