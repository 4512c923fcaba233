"""Detects the rank of a log line by the prefixes of launchers. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OURS = re.compile(r"rank (\d+) \| ")
_OF_TORCHRUN = re.compile(r"\[[A-Za-z_]+(\d+)\]:")
"""Default prefix of torchrun: name of the role and local rank."""


@dataclass(frozen=True, slots=True)
class Only:
    """One rank whose lines are selected."""

    rank: int
    workers_per_node: int

    def takes(self, line: str, node: int) -> bool:
        """Return whether a line of pod `node`, counted from 0 in the order of names, is from this rank.

        In files that hp-ext renders, the launcher prefixes the global rank. In other files, the rank follows from the
        order of pods; lines without a prefix count if they are from the rank's pod.
        """
        if marked := _OURS.match(line):
            return int(marked[1]) == self.rank
        here = node == self.rank // self.workers_per_node
        if marked := _OF_TORCHRUN.match(line):
            return here and int(marked[1]) == self.rank % self.workers_per_node
        return here
