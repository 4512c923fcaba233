"""What the kernel says of processes: memory and CPU time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from hyperpod_ext.processes import descendants

_SAMPLE_S = 0.02


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
