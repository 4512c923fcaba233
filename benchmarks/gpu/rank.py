"""One rank of an experiment: `rank.py JSON`, which `rank_processes.py` starts.

A thread reads commands. On `abort` it aborts every group of this process at once, as the product does, while the main
thread sits in whatever it was doing; other words are kept for the body.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lane import Lane

from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.process_group import torch_private
from hyperpod_ext.runtime.process_group.gloo.sockets import duplicate, end_reading, event_loops
from hyperpod_ext.runtime.process_group.gloo.waits import wait_until_idle

_GROUP_TIMEOUT_S = 100.0


class Rank:
    """What a body is given."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.lane = Lane.from_json(given["lane"])
        self.rank, self.world_size = int(given["rank"]), int(given["world_size"])
        self.options: dict[str, Any] = given["options"]
        self.device = torch.device(self.lane.device)
        self.store = dist.TCPStore("127.0.0.1", given["port"], is_master=False, wait_for_workers=False)
        self.aborted = threading.Event()
        """Set when the abort has returned."""
        self.before_abort: Callable[[], None] = lambda: None
        self.kept: object = None
        """What torch calls, and does not keep alive."""
        self.one_by_one = False
        """Abort one group after the other, not all at once."""
        self._reports = Path(given["reports"])
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self, event: str, **fields: Any) -> None:
        with self._reports.open("a") as file:
            file.write(json.dumps({"event": event, "t": time.monotonic(), **fields}) + "\n")

    def wait_for(self, word: str) -> None:
        """Until the experiment says it."""
        while self._words.get() != word:
            pass

    def open(
        self, generation: int = 0, *, world_size: int = 0, timeout_s: float = _GROUP_TIMEOUT_S, backend: str = ""
    ) -> None:
        """Open the default group; ranks of one generation meet under its number."""
        self.aborted.clear()
        torch_private.forget_groups()
        dist.init_process_group(
            backend or self.lane.backend,
            store=dist.PrefixStore(f"generation{generation}", self.store),
            rank=self.rank,
            world_size=world_size or self.world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def close(self) -> float:
        """Destroy all groups; returns the seconds it took. No module or work of theirs may be alive."""
        gc.collect()
        if self.lane.fake:
            wait_until_idle()  # or torch may hang for good
        began = time.monotonic()
        dist.destroy_process_group()
        return time.monotonic() - began

    def repeat(self, step: Callable[[], object]) -> None:
        """Call `step` until this process has aborted its groups, which it waits for once the step has raised."""
        try:
            for number in itertools.count():
                step()
                self.synchronize()
                if number == 0:
                    self.report("running")
                if self.aborted.is_set():
                    break
        except RuntimeError as error:
            self.report("raised", error=f"{type(error).__name__}: {str(error)[:300]}")
            if not self.aborted.wait(_GROUP_TIMEOUT_S):
                raise
        self.report("free")

    def synchronize(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == "abort":
                self._abort()
            self._words.put(line.strip())

    def _abort(self) -> None:
        began = time.monotonic()
        self.before_abort()
        self._abort_groups()
        self.report("aborted", seconds=time.monotonic() - began)
        self.aborted.set()

    def _abort_groups(self) -> None:
        if self.lane.fake:
            return _shut_down_gloo()
        backends = [group._get_backend(self.device) for group in torch_private.open_groups().values()]
        if self.one_by_one:
            for backend in backends:
                backend.abort()
            return None
        threads = [threading.Thread(target=backend.abort) for backend in backends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return None


def _shut_down_gloo() -> None:
    """gloo has no abort. A connection whose reading has ended makes its operations raise."""
    for loop in event_loops():
        for connection in loop.connections.values():
            copy = duplicate(connection.fd, connection.inode)
            if copy is not None:
                end_reading(copy)


def main(given: dict[str, Any]) -> None:
    die_with_parent(given["parent"])
    torch.set_num_threads(1)
    module, _, function = given["body"].partition(":")
    getattr(importlib.import_module(module), function)(Rank(given))


if __name__ == "__main__":
    code = 0
    try:
        main(json.loads(sys.argv[1]))
    except Exception:  # shown by the experiment that waits for this rank
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of torch may wait for ranks that are gone
