"""Where no agent of ours writes a job's event log: the memory server keeps what its node's processes have written.

It brings their events to the first durable tier, beside the checkpoints, and says which of them died without a word.
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
_LAST_WORDS = frozenset({"done", "stopped"})
_DIED = "its process ended without a word: the launcher's log says how"
_EXIT_CODE = 49
"""Place of the status of a process that has ended, after its name, in /proc/PID/stat."""


@dataclass(slots=True)
class _Process:
    """A rank's process, as its events show it."""

    handle: int
    """Of the process; -1: it has ended."""
    rank: int = -1
    step: int = 0
    generation: int | None = None
    last: str = ""


class NodeEventLog:
    """This node's share of the job's event log.

    Args:
        directory: where its processes write.
        store: place of the job in the durable tier; None: it has none, and nothing is kept.
        node: number of this node by now.
        numbers: what becomes of events besides; None: nothing.
    """

    def __init__(
        self, directory: Path, store: ObjectStore | None, node: Callable[[], int], numbers: NodeNumbers | None = None
    ) -> None:
        self._spool, self._node, self._numbers = SpoolReader(directory), node, numbers
        self._kept = KeptLog(store, node()) if store is not None else None
        self._processes: dict[int, _Process] = {}
        self._ends = select.epoll()
        """Handles of processes: those that have ended come in the order in which they did, so the first fault is the
        one for which a launcher has ended the others."""
        self._faulty = False
        """A fault is known since this node's ranks have joined."""
        self._urgent, self._next = False, 0.0
        self._wanted, self._done = 0, 0
        self._changed = threading.Condition()
        self._failed = ""
        self._own_events: list[bytes] = []
        """Events of this process."""
        threading.Thread(target=self._work, name="event log", daemon=True).start()

    def enter(self, first: tuple[str, int] | None) -> None:
        """A generation begins; `first`: where the memory server of node 0 listens."""
        if self._numbers is not None:
            self._numbers.enter(self._node(), first, self._own)

    def receive(self, epoch: float, lines: Sequence[str]) -> None:
        """Another node has told its events."""
        if self._numbers is not None:
            self._numbers.receive(epoch, lines)

    def _own(self, event: str, **fields: Any) -> None:
        """An event of this process."""
        with self._changed:
            self._own_events.append(checked(event, fields)[1])

    def wait_kept(self, timeout_s: float) -> bool:
        """Until all that was written before is kept, or could not be. 0 asks whether it is."""
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
                self._take()
                for handle, _ in ended:
                    self._ended(handle)
                if self._numbers is not None:
                    self._numbers.forward()
                if urgent or self._urgent or time.monotonic() >= self._next:
                    self._keep()
            except Exception as error:  # whatever it was: the job goes on, and so does this thread
                self._say(repr(error))
            with self._changed:
                self._done = wanted
                self._changed.notify_all()

    def _take(self) -> None:
        """What processes have written since."""
        if self._kept is not None and self._kept.full:
            return  # the place cannot be reached; what is written meanwhile stays where it is
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
        """Tell of the end of a rank's process. Who has not seen it alive cannot: others may have waited for it."""
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
        """A process has ended: a fault, unless it was done, or went with another for which its node is started anew."""
        with self._changed:
            pid, process = next(one for one in self._processes.items() if one[1].handle == handle)
        os.close(handle)
        process.handle = -1
        if process.rank < 0 or process.last in _LAST_WORDS or self._faulty:
            return
        self._faulty = self._urgent = True
        kind, cause = _how(pid)
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
                self._say(f"{error}; {lost} bytes of events were given up")
            else:
                self._say(str(error))
            return
        self._urgent, self._failed = False, ""
        self._spool.keep()

    def _say(self, why: str) -> None:
        if why != self._failed:
            self._failed = why
            sys.stderr.write(f"the job's events are not kept: {json.dumps(why)}\n")


def _how(pid: int) -> tuple[str, str]:
    """Kind and cause of the end of somebody else's child, which the kernel shows until its parent has waited for it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", _DIED
    if fields[0] != "Z":
        return "", _DIED
    found = decode_exit(int(fields[_EXIT_CODE]))
    return found.kind, found.cause
