"""Ranks of an experiment as processes: started, killed for real, and told to abort, as an agent does it.

The experiment's process holds the store in which ranks meet, so any rank may die. A rank reports in a file of JSON
lines, and reads commands on its standard input. `rank.py` is the other side.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from lane import Lane

RANK = Path(__file__).resolve().parent / "rank.py"
Report = dict[str, Any]
_LOOK_S = 0.002


class RankError(Exception):
    """A rank did not do what the experiment waits for."""


class RankProcesses:
    """Ranks 0 to `world_size` - 1, each of which calls `body(rank)` of a module.

    Args:
        body: `module:function`.
        recovery: with the environment that recovery needs of NCCL.
        more: environment of each rank beside that.
        options: for the body, as JSON.
    """

    def __init__(
        self,
        lane: Lane,
        body: str,
        world_size: int,
        *,
        recovery: bool = True,
        more: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._lane, self._body, self.world_size, self._options = lane, body, world_size, options
        self._recovery, self._more = recovery, dict(more or {})
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._files: dict[int, Path] = {}

    def __enter__(self) -> RankProcesses:
        for rank in range(self.world_size):
            self.start(rank)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def start(self, rank: int, **options: Any) -> None:
        """Start a rank's process, or another one after it died; `options` replace those of all."""
        attempt = len(list(self._folder.glob(f"rank{rank}.*")))
        self._files[rank] = self._folder / f"rank{rank}.{attempt}.jsonl"
        given = {
            "lane": self._lane.to_json(),
            "body": self._body,
            "rank": rank,
            "world_size": self.world_size,
            "port": self._store.port,
            "reports": str(self._files[rank]),
            "parent": os.getpid(),
            "options": self._options | options,
        }
        self._processes[rank] = subprocess.Popen(
            [sys.executable, str(RANK), json.dumps(given)],
            env=self._lane.environment(rank, recovery=self._recovery) | self._more,
            stdin=subprocess.PIPE,
        )

    def kill(self, rank: int) -> float:
        """SIGKILL; returns when, by the machine's monotonic clock."""
        killed = time.monotonic()
        self._processes[rank].kill()
        self._processes[rank].wait()
        return killed

    def signal(self, rank: int, number: signal.Signals) -> None:
        self._processes[rank].send_signal(number)

    def tell(self, word: str, ranks: Collection[int] | None = None) -> float:
        """Have these ranks (all that live) read this word; returns when.

        Raises:
            RankError: one has ended.
        """
        for rank in self.living() if ranks is None else ranks:
            pipe = self._processes[rank].stdin
            assert pipe is not None
            try:
                pipe.write(f"{word}\n".encode())
                pipe.flush()
            except BrokenPipeError:
                raise RankError(f"rank {rank} ended with {self._processes[rank].wait()} before {word!r}") from None
        return time.monotonic()

    def living(self) -> list[int]:
        return [rank for rank, process in self._processes.items() if process.poll() is None]

    def until_ended(self, ranks: Collection[int], limit_s: float) -> float:
        """Until these have ended by themselves; returns when the last one had."""
        deadline = time.monotonic() + limit_s
        while living := set(ranks) & set(self.living()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {sorted(living)} lived on for {limit_s:g} s")
            time.sleep(_LOOK_S)
        return time.monotonic()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def exit_code(self, rank: int) -> int | None:
        """None: it runs."""
        return self._processes[rank].poll()

    def until(
        self, event: str, limit_s: float, ranks: Collection[int] | None = None, **fields: Any
    ) -> dict[int, Report]:
        """The first report of this event, with these fields, of each of these ranks (of all).

        Raises:
            RankError: one ended without it.
            TimeoutError: it took longer.
        """
        wanted = set(range(self.world_size) if ranks is None else ranks)
        deadline, found = time.monotonic() + limit_s, dict[int, Report]()
        while True:
            ended = {rank for rank in wanted if self._processes[rank].poll() is not None}  # before their last reports
            for rank in wanted - found.keys():
                if report := self._first(rank, {"event": event} | fields):
                    found[rank] = report
            missing = wanted - found.keys()
            if not missing:
                return found
            if gone := sorted(missing & ended):
                raise RankError(f"rank {gone[0]} ended with {self.exit_code(gone[0])} before it reported {event!r}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {sorted(missing)} did not report {event!r} within {limit_s:g} s")
            time.sleep(_LOOK_S)

    def _first(self, rank: int, wanted: Report) -> Report | None:
        return next((one for one in self.reports(rank) if wanted.items() <= one.items()), None)

    def reports(self, rank: int) -> Sequence[Report]:
        """All of a rank's newest process, so far."""
        if not self._files[rank].exists():
            return []
        whole, newline, _ = self._files[rank].read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()] if newline else []

    def end(self, limit_s: float = 60.0) -> None:
        """Every rank's body returns, and its process ends well."""
        for rank in list(self._processes):
            code = self._processes[rank].wait(limit_s)
            if code != 0:
                raise RankError(f"rank {rank} ended with {code}")
