"""Rank 0's log, followed while its process is on this node: a rank that breaks a rule is ended."""

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
    """Looks at what is written to a log, for as long as it runs.

    Args:
        log: of rank 0, on this node or another; it need not be there yet.
        broken: takes which rule is broken, and how; called once until the job has gone on.
        is_here: whether rank 0 is on this node; where it is not, the log is left alone.
    """

    def __init__(
        self, rules: LogRules, log: Path, broken: Callable[[str], None], is_here: Callable[[], bool] = lambda: True
    ) -> None:
        self._rules, self._log, self._broken, self._is_here = rules, log, broken, is_here
        self._offset = 0
        self._rest = b""
        """Of a line that is not complete."""

    @property
    def has_rules(self) -> bool:
        return bool(self._rules)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look()

    def hear(self, message: c.ToAgent | c.FromAgent) -> None:
        """What is said between the agent here and the coordinator."""
        match message:
            case c.GoOn():
                self._read()  # what was printed before is no fault any more
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
        with contextlib.suppress(OSError), self._log.open("rb") as log:  # it is not there yet, or its disk is broken
            log.seek(self._offset)
            grown = log.read()
        self._offset += len(grown)
        *lines, self._rest = (self._rest + grown).split(b"\n")
        self._rules.read([line.decode(errors="replace") for line in lines], time.monotonic())
