"""Uploads the events of a node's processes, for jobs without our agent. Runs in the node's memory server.

The events are uploaded next to the checkpoints, to the first durable tier that is not on the node's own disk. If a
process dies without logging a last event, the memory server writes a `fault` event for the process.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.runtime.detection.failure_causes import decode_exit
from hyperpod_ext.runtime.events.kept import AT_ONCE, EVERY_S, KeptLog
from hyperpod_ext.runtime.events.log import checked
from hyperpod_ext.runtime.events.reading import parse_line
from hyperpod_ext.runtime.events.spool import SpoolReader
from hyperpod_ext.runtime.memory_server.node_numbers import NodeNumbers
from hyperpod_ext.runtime.storage.object_store import ObjectStore

_LOOK_S = 0.5
_LAST_EVENTS = frozenset({"done", "stopped"})
_UNKNOWN_END = "its process ended with an unknown exit status; see the launcher's log"
_EXIT_CODE = 49
"""Index of the exit status in /proc/PID/stat, counted from the field after the process name."""


@dataclass(slots=True)
class _Process:
    """A rank's process, with its state according to the events that the process wrote."""

    handle: int
    """pidfd of the process; -1 after the process has ended."""
    rank: int = -1
    step: int = 0
    generation: int | None = None
    last: str = ""


class NodeEventLog:
    """This node's part of the job's event log.

    Args:
        directory: folder to which the node's processes write events.
        store: the job's folder in a durable tier; None if the job has no durable tier, so that no events are uploaded.
        node: returns this node's current number.
        numbers: computes metrics from the events, or None if metrics are not configured.
    """

    def __init__(
        self, directory: Path, store: ObjectStore | None, node: Callable[[], int], numbers: NodeNumbers | None = None
    ) -> None:
        self._spool, self._node, self._numbers = SpoolReader(directory), node, numbers
        self._kept = KeptLog(store, node()) if store is not None else None
        self._processes: dict[int, _Process] = {}
        self._ends = select.epoll()
        """The pidfds of all processes. A poll returns processes in the order in which they ended: a failed process
        before the processes that the launcher then kills."""
        self._faulty = False
        """Whether a fault was logged since the ranks of this node last joined the job."""
        self._urgent, self._next = False, 0.0
        self._wanted, self._done = 0, 0
        self._changed = threading.Condition()
        self._failed = ""
        self._own_events: list[bytes] = []
        """Events of the memory server itself that are not yet added to the log."""
        threading.Thread(target=self._work, name="event log", daemon=True).start()

    def enter(self, first: tuple[str, int] | None) -> None:
        """Begin a new generation of the job. `first` is the address of the memory server on node 0."""
        if self._numbers is not None:
            self._numbers.enter(self._node(), first, self._own)

    def receive(self, epoch: float, lines: Sequence[str]) -> None:
        """Add another node's events to the metrics. `epoch` is the Unix time at which the other node's monotonic clock
        was 0."""
        if self._numbers is not None:
            self._numbers.receive(epoch, lines)

    def _own(self, event: str, **fields: Any) -> None:
        """Log an event of the memory server itself."""
        with self._changed:
            self._own_events.append(checked(event, fields)[1])

    def wait_kept(self, timeout_s: float) -> bool:
        """Wait until all events that were written before this call are uploaded, or an upload has failed. Returns False
        after `timeout_s`.

        If `timeout_s` is 0, returns at once whether all events are uploaded or the last upload has failed.
        """
        if not timeout_s:
            return bool(self._failed) or not self._spool.left
        with self._changed:
            self._wanted += 1
            wanted = self._wanted
            return self._changed.wait_for(lambda: self._done >= wanted, timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                wanted = self._wanted
            urgent = wanted > self._done
            ended = self._ends.poll(0 if urgent else _LOOK_S)
            try:
                self._read_spool()
                for handle, _ in ended:
                    self._ended(handle)
                if self._numbers is not None:
                    self._numbers.forward()
                if urgent or self._urgent or time.monotonic() >= self._next:
                    self._keep()
            except Exception as error:  # an error must end neither the job nor this thread
                self._report(repr(error))
            with self._changed:
                self._done = wanted
                self._changed.notify_all()

    def _read_spool(self) -> None:
        """Read the events that processes have written since the last call."""
        if self._kept is not None and self._kept.full:
            return  # too many events wait to be uploaded, so leave new events in the processes' files
        for pid, lines in self._spool.read().items():
            process = self.watch(pid)
            for line in lines:
                if (entry := parse_line(line)) is not None:
                    self._follow(process, entry)
            self._add(lines)
        with self._changed:
            events, self._own_events = self._own_events, []
        self._add(events)

    def _add(self, lines: Sequence[bytes]) -> None:
        if self._kept is not None:
            self._kept.add(lines)
        if self._numbers is not None:
            self._numbers.add(lines)

    def watch(self, pid: int) -> _Process:
        """Watch a rank's process, to log a fault when the process ends. If the process ended before this call, its exit
        status is unknown."""
        with self._changed:
            if (known := self._processes.get(pid)) is not None:
                return known
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                handle = -1
            else:
                self._ends.register(handle, select.EPOLLIN)
            process = self._processes[pid] = _Process(handle)
            return process

    def _follow(self, process: _Process, entry: dict[str, Any]) -> None:
        name = str(entry["event"])
        if isinstance(rank := entry.get("rank"), int):
            process.rank = rank
        if isinstance(generation := entry.get("generation"), int):
            process.generation = generation
        if name in ("step", "begun", "go") and isinstance(step := entry.get("step"), int):
            process.step = step
        if name in ("joined", "fault"):
            self._faulty = name == "fault"
        process.last = name
        self._urgent |= name in AT_ONCE

    def _ended(self, handle: int) -> None:
        """Log the end of a process as a fault. Logs nothing if the process finished normally, or if a fault was already
        logged on this node."""
        with self._changed:
            pid, process = next(one for one in self._processes.items() if one[1].handle == handle)
        os.close(handle)
        process.handle = -1
        if process.rank < 0 or process.last in _LAST_EVENTS or self._faulty:
            return
        self._faulty = self._urgent = True
        kind, cause = _exit_of(pid)
        fields = {"rank": process.rank, "node": self._node(), "step": process.step + 1, "cause": cause, "died": True}
        more = {"kind": kind, "escalation_level": "process", "generation": process.generation}
        self._add([checked("fault", fields | more)[1]])

    def _keep(self) -> None:
        self._next = time.monotonic() + EVERY_S
        try:
            if self._kept is not None:
                self._kept.flush()
        except HyperpodExtError as error:
            if lost := self._spool.shed():
                self._report(f"{error}; {lost} bytes of events were deleted")
            else:
                self._report(str(error))
            return
        self._urgent, self._failed = False, ""
        self._spool.keep()

    def _report(self, why: str) -> None:
        if why != self._failed:
            self._failed = why
            sys.stderr.write(f"the job's events are not kept: {json.dumps(why)}\n")


def _exit_of(pid: int) -> tuple[str, str]:
    """Return the kind and cause of a process's end, which are unknown once the process's parent has waited for the
    process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", _UNKNOWN_END
    if fields[0] != "Z":
        return "", _UNKNOWN_END
    found = decode_exit(int(fields[_EXIT_CODE]))
    return found.kind, found.cause
