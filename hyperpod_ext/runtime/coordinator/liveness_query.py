"""When a rank's collective broke, and no death explains it: every agent says whether its ranks live.

The kernel marks a process as ending before it closes its sockets. So when all agents have looked after a rank saw its
connection end, and none has found such a process, nobody died: the connection itself broke.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ext.runtime.membership.actions import Fault

_ENDING = 0x4
"""PF_EXITING, of a process's flags."""


@dataclass(slots=True)
class RollCall:
    """Who has answered. One call a generation is enough: the first rank that complains speaks for all."""

    generation: int
    fault: Fault
    """What has happened if all ranks live."""
    missing: set[int] = field(default_factory=set)
    """Nodes that have yet to answer; one that cannot is found when its lease is over."""

    def present(self, node: int, generation: int) -> Fault | None:
        """All ranks of `node` live; the fault, once that is said of all nodes."""
        if generation != self.generation or node not in self.missing:
            return None
        self.missing.discard(node)
        return None if self.missing else self.fault


def all_live(pids: Collection[int]) -> bool:
    """Whether none of these processes of this machine ends, or has ended."""
    return not any(_is_ending(pid) for pid in pids)


def _is_ending(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _ENDING)
