"""Scheduler of local jobs: starts one process (the agent) per node, and waits until all agents have ended.

This module imports only the standard library and starts no threads, because it runs Python code between fork and exec.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyperpod_ext.files import make_private_folder, open_private
from hyperpod_ext.jobs.local.result import NodeEnd
from hyperpod_ext.processes import die_with_parent

Action = Literal["wait", "terminate", "kill"]
WANTED = "nodes_wanted.json"
"""File in which the agents request nodes. A copy of `config.resize.WANTED`, because importing `config` is slow."""
_ABANDONED_S = 1.0
"""Seconds between checks whether the job's folder was removed."""
_LOOK_S = 0.1
"""Seconds between checks for newly requested nodes."""


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """Command that runs one node's agent."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    log: Path


@dataclass(frozen=True, slots=True)
class GracePeriod:
    """Time limits after which the scheduler stops nodes, in seconds."""

    after_failure_s: float = 10.0
    """Time after a node's failure in which the other nodes may end by themselves."""
    node_wait_s: float = 0.0
    """Additional time before `after_failure_s` begins, in which the coordinator may replace a lost node."""
    after_asking_s: float = 5.0
    """Time between SIGTERM and SIGKILL for a node's agent."""
    needed: int | None = None
    """Number of nodes that the job needs to continue; None means all nodes."""
    restarts: int = 0
    """Maximum number of restarts of killed nodes. A killed node is restarted if fewer than `needed` nodes are left."""


class Cancellation:
    """Records that this process received SIGTERM, and wakes a `poll` that waits."""

    def __init__(self) -> None:
        self.requested = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, _signum: int, _frame: object) -> None:
        self.requested = True

    def fileno(self) -> int:
        return self._reader

    def drain(self) -> None:
        """Remove the wake-up from the pipe, and leave `requested` unchanged."""
        os.read(self._reader, 4096)


def next_action(
    now: float, failed_at: float | None, asked_at: float | None, cancelled: bool, grace_period: GracePeriod
) -> tuple[Action, float | None]:
    """Return the action for running nodes, and the seconds until the next check (None: no check is needed).

    Args:
        now: current time. All times are seconds of the monotonic clock.
        failed_at: time at which `after_failure_s` begins, after a node's failure; None if no node has failed.
        asked_at: time at which SIGTERM was sent to the nodes; None if SIGTERM was not sent.
        cancelled: whether the job was cancelled.
    """
    if asked_at is not None:
        left = asked_at + grace_period.after_asking_s - now
        return ("wait", left) if left > 0 else ("kill", None)
    if cancelled:
        return "terminate", 0.0
    if failed_at is not None:
        left = failed_at + grace_period.after_failure_s - now
        return ("wait", left) if left > 0 else ("terminate", 0.0)
    return "wait", None


class Wanted:
    """Reads the file in which the agents of a resizable job request the nodes that they want to run.

    Args:
        file: JSON file whose field `nodes` has the node numbers. The agents replace the file atomically.
        report: file that the agents write at the end of the job. A node that exits with code 0 before the report exists
            has left the job.
        make: returns the command of a node, given its number.
    """

    def __init__(self, file: Path, report: Path, make: Callable[[int], NodeCommand]) -> None:
        self._file, self._report, self.make = file, report, make
        self._seen: tuple[int, int] | None = None
        self.nodes: frozenset[int] | None = None
        """Numbers of the requested nodes; None before the first request."""

    def look(self) -> bool:
        """Read the file; return whether it has changed."""
        try:
            status = self._file.stat()
            if (status.st_ino, status.st_mtime_ns) == self._seen:
                return False
            self.nodes = frozenset(json.loads(self._file.read_text())["nodes"])
        except FileNotFoundError:
            return False
        self._seen = status.st_ino, status.st_mtime_ns
        return True

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self._report.exists()


def run_nodes(
    nodes: list[NodeCommand],
    cancellation: Cancellation,
    grace_period: GracePeriod | None = None,
    wanted: Wanted | None = None,
    seen: Callable[[NodeEnd], None] = lambda end: None,
    abandoned: Callable[[], bool] = lambda: False,
    end_left: Callable[[Collection[int]], None] = lambda pids: None,
) -> list[int]:
    """Run all nodes to their end; return the exit code of each node's last process, negative for a signal.

    Args:
        wanted: nodes that the job requests while it runs; None for a job with a fixed set of nodes.
        seen: called each time a node's process has ended, before the scheduler reacts to the end.
        abandoned: returns whether to stop all nodes, because the job's folder was removed.
        end_left: called each time a node's process has ended, with the process ids of the running nodes. Kills the
            remaining processes of nodes that have ended.
    """
    grace_period = grace_period or GracePeriod()
    needed = len(nodes) if grace_period.needed is None else grace_period.needed
    codes = [0] * len(nodes)
    running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
    poll = select.poll()

    def start(index: int, *, again: bool = False) -> None:
        process = _start(nodes[index], again=again)
        descriptor = os.pidfd_open(process.pid)
        running[descriptor] = index, process
        poll.register(descriptor, select.POLLIN)

    poll.register(cancellation.fileno(), select.POLLIN)
    for index in range(len(nodes)):
        start(index)
    failed_at: float | None = None
    asked_at: float | None = None
    restarted: set[int] = set()
    restarts, ended_well, news = grace_period.restarts, 0, False
    while running:
        now = time.monotonic()
        cancellation.requested |= abandoned()
        # a restarted node cannot be the coordinator: wait only if a node that was not restarted still runs
        may_wait = any(index not in restarted for index, _ in running.values())
        waits_s = grace_period.node_wait_s if failed_at is not None and may_wait else 0.0
        since = None if failed_at is None else failed_at + waits_s
        action, wait_s = next_action(now, since, asked_at, cancellation.requested, grace_period)
        if action == "wait":
            wait_s = min(_ABANDONED_S, _ABANDONED_S if wait_s is None else wait_s)
        if wanted is not None and action == "wait":
            wait_s = min(_LOOK_S, _LOOK_S if wait_s is None else wait_s)
            news |= wanted.look()
            if news and failed_at is None and not ended_well:
                news = False
                for number in sorted((wanted.nodes or frozenset()) - {index for index, _ in running.values()}):
                    while number >= len(nodes):
                        nodes.append(wanted.make(len(nodes)))
                        codes.append(0)
                    start(number, again=True)
        if action != "wait":
            asked_at = asked_at or now
            for _, process in running.values():
                process.send_signal(signal.SIGTERM if action == "terminate" else signal.SIGKILL)
        for descriptor, _events in poll.poll(None if wait_s is None else int(wait_s * 1000) + 1):
            if descriptor == cancellation.fileno():
                cancellation.drain()
                continue
            poll.unregister(descriptor)
            os.close(descriptor)
            index, process = running.pop(descriptor)
            codes[index] = process.wait()
            end_left([process.pid for _, process in running.values()])
            enough = len(running) + ended_well >= needed
            again = codes[index] < 0 and restarts > 0 and not (ended_well or enough or failed_at or asked_at)
            seen(NodeEnd(index, codes[index], asked_at is not None, again))
            if wanted is not None and codes[index] == 0 and not wanted.is_over:
                wanted.look()
                news = True  # the job may have requested this node again before the process ended
                continue
            ended_well += codes[index] == 0
            if again:
                restarts -= 1
                start(index, again=True)
                restarted.add(index)
            elif codes[index] != 0 and not (enough or failed_at or asked_at):
                failed_at = time.monotonic()
    return codes


def _start(node: NodeCommand, *, again: bool) -> subprocess.Popen[bytes]:
    make_private_folder(node.log.parent)
    parent = os.getpid()
    with open_private(node.log, "ab") as log:
        return subprocess.Popen(
            node.command,
            env={**node.env, "HPX_REJOIN": "1"} if again else node.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: die_with_parent(parent),  # preexec_fn is safe, because this process has no threads
        )
