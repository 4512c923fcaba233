"""The free memory of this node: the lesser of the machine's and the container's free memory."""

from __future__ import annotations

from pathlib import Path

# share of the available memory to keep free; without free memory, the kernel would kill processes
_KEEP_FREE = 0.05


def usable_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of bytes that can be reserved now: 95 % of the available memory."""
    return int((1 - _KEEP_FREE) * min(_machine_available(proc), _cgroup_available(proc, cgroup)))


def _machine_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{proc / 'meminfo'} has no MemAvailable line")


def _cgroup_available(proc: Path, cgroup: Path) -> float:
    """Return the number of bytes left under the strictest cgroup v2 memory limit that applies to this process; infinite
    if no limit applies."""
    available = float("inf")
    for line in (proc / "self/cgroup").read_text().splitlines():
        if not line.startswith("0::"):
            continue
        folder = cgroup / line.removeprefix("0::").lstrip("/")
        while True:
            limit, used = folder / "memory.max", folder / "memory.current"
            if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
                available = min(available, int(text) - int(used.read_text()))
            if folder == cgroup:
                break
            folder = folder.parent
    return available
