"""Reads rank 0's log while rank 0 runs on this node, and reports rules that its output breaks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.log_rules.rules import LogRules

_LOOK_S = 0.5


class LogWatch:
    """Reads the log of rank 0 as it grows, and evaluates rules on it.

    Args:
        log: log of rank 0. The file need not exist yet.
        broken: called with the name of a broken rule and how it is broken, but only once until the job continues.
        is_here: returns whether rank 0 runs on this node; otherwise the log is not read.
    """

    def __init__(
        self, rules: LogRules, log: Path, broken: Callable[[str], None], is_here: Callable[[], bool] = lambda: True
    ) -> None:
        self._rules, self._log, self._broken, self._is_here = rules, log, broken, is_here
        self._offset = 0
        self._rest = b""
        """The beginning of a line whose end has not been read yet."""

    @property
    def has_rules(self) -> bool:
        return bool(self._rules)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look()

    def hear(self, message: c.ToAgent | c.FromAgent) -> None:
        """Update the rules after a message between this agent and the coordinator."""
        match message:
            case c.GoOn():
                self._read()  # read earlier lines first, so that they do not count as faults
                self._rules.train(time.monotonic())
            case c.AbortGeneration() | c.FinishTraining() | c.Finished(rank=0):
                self._rules.pause()

    def _look(self) -> None:
        if not self._is_here():
            return
        self._read()
        if why := self._rules.problem(time.monotonic()):
            self._rules.pause()
            self._broken(why)

    def _read(self) -> None:
        if not self._is_here():
            return
        grown = b""
        # ignore an OSError: the file does not exist yet, or the disk is broken
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(self._offset)
            grown = log.read()
        self._offset += len(grown)
        *lines, self._rest = (self._rest + grown).split(b"\n")
        self._rules.read([line.decode(errors="replace") for line in lines], time.monotonic())
