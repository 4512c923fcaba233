"""What the kernel says of processes: memory and CPU time, of ours and of others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hyperpod_ext.processes import descendants

_SAMPLE_S = 0.02
_LOOK_S = 0.3


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of one process: `anonymous` (its own, shared by fork or not), and its share of `anon` and `shmem`."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return {"anonymous": fields["Anonymous"], "anon": fields["Pss_Anon"], "shmem": fields["Pss_Shmem"]}


def cpu_of(pid: int) -> float:
    """CPU seconds of one process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / 100.0


def busy_s() -> float:
    """CPU seconds of all processes so far, and of neighbours that the host ran in their place."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq + steal) / 100.0


class Neighbours:
    """The share of a core that processes took that are not of this benchmark: what disturbs it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._since, self._before = time.monotonic(), self._taken()

    def ours(self) -> list[int]:
        """Processes that are no neighbours."""
        return [os.getpid(), *descendants(os.getpid())]

    def share(self) -> float:
        """Since it began."""
        return max(0.0, self._taken() - self._before) / max(time.monotonic() - self._since, 1e-3)

    def _taken(self) -> float:
        everybody, ours = busy_s(), 0.0
        for pid in self.ours():
            try:
                ours += cpu_of(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
        return everybody - ours

    def wait_quiet(self, most: float, patience_s: float) -> None:
        """Until they take no more than `most` of a core, or for so long; begins."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            self.begin()
            time.sleep(_LOOK_S)
            if self.share() <= most:
                break
        self.begin()


def memory_of_tree(pid: int) -> dict[str, int]:
    """Bytes of a trainer: its own anonymous memory, that of what it started, and shared memory of both."""
    own, helpers = memory_of(pid), {"anon": 0, "shmem": 0}
    for child in descendants(pid):
        try:
            found = memory_of(child)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        helpers = {name: helpers[name] + found[name] for name in helpers}
    return {"own": own["anonymous"], "helpers": helpers["anon"], "shared": own["shmem"] + helpers["shmem"]}


class MemoryPeak:
    """The most memory that trainers took while the block ran, each kind by itself."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._stop = pids, threading.Event()
        self.peaks = [memory_of_tree(pid) for pid in pids]

    def __enter__(self) -> MemoryPeak:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            found = [memory_of_tree(pid) for pid in self._pids]
            self.peaks = [{kind: max(a[kind], b[kind]) for kind in a} for a, b in zip(self.peaks, found, strict=True)]
