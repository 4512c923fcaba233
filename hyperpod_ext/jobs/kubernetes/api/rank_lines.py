"""Whose line it is: what launchers put before the lines of a worker. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OURS = re.compile(r"rank (\d+) \| ")
_OF_TORCHRUN = re.compile(r"\[[A-Za-z_]+(\d+)\]:")
"""Its default: name of the role and local rank."""


@dataclass(frozen=True, slots=True)
class Only:
    """One rank, whose lines are wanted."""

    rank: int
    workers_per_node: int

    def takes(self, line: str, node: int) -> bool:
        """Whether a line of pod `node`, counted from 0 in the order of names, is of this rank.

        Files that are rendered here have the launcher write the rank itself, wherever it runs. Elsewhere the order of
        pods must do: of lines without a mark, those of the rank's own pod are taken.
        """
        if marked := _OURS.match(line):
            return int(marked[1]) == self.rank
        here = node == self.rank // self.workers_per_node
        if marked := _OF_TORCHRUN.match(line):
            return here and int(marked[1]) == self.rank % self.workers_per_node
        return here
