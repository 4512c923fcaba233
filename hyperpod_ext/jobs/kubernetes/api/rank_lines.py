"""Detects the rank of a log line by the prefix that the launcher adds. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OURS = re.compile(r"rank (\d+) \| ")
_OF_TORCHRUN = re.compile(r"\[[A-Za-z_]+(\d+)\]:")
"""Pattern of torchrun's default prefix, with the name of the role and the local rank."""


@dataclass(frozen=True, slots=True)
class Only:
    """Selects the log lines of one rank."""

    rank: int
    workers_per_node: int

    def takes(self, line: str, node: int) -> bool:
        """Return whether a log line is from the rank `rank`.

        In jobs that hp-ext rendered, the launcher adds the global rank as a prefix. In other jobs, the rank is computed
        from the pod's index and the local rank in torchrun's prefix. A line without a prefix is selected if it is from
        the pod that runs the rank.

        Args:
            node: index of the line's pod among the job's pods, sorted by number, counted from 0.
        """
        if marked := _OURS.match(line):
            return int(marked[1]) == self.rank
        here = node == self.rank // self.workers_per_node
        if marked := _OF_TORCHRUN.match(line):
            return here and int(marked[1]) == self.rank % self.workers_per_node
        return here
