"""Local jobs kept apart, and a count of what they leave behind."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from waiting import PATIENCE_S


def slow_down(script: Path) -> None:
    """Have the example's script wait a moment in each step: it leaves the machine to the commands that look at it."""
    loop = "run.steps(args.steps):\n"
    script.write_text(script.read_text().replace(loop, f"{loop}        __import__('time').sleep(0.05)\n"))


@dataclass(frozen=True)
class LocalPlace:
    """A machine of one's own: where local jobs are kept, and what they leave behind."""

    home: Path
    scratch: Path

    def processes(self) -> list[int]:
        """Every living process that a job here has started."""
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and self._ours(entry)]

    def lasting(self) -> list[int]:
        """Those of them that do not end by themselves; waits for the kernel, which takes a moment for each."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def leftovers(self) -> list[str]:
        """Processes and temporary folders that outlived their job; waits for the kernel."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _left(self) -> list[str]:
        return [f"process {pid}" for pid in self.processes()] + [entry.name for entry in self.scratch.glob("hpx*")]

    def _ours(self, process: Path) -> bool:
        try:
            text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        return state != "Z" and f"{self.home}/local/".encode() in text
