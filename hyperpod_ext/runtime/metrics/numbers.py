"""The job's numbers where no agent of ours coordinates: the memory server of node 0 shows them, from all nodes' events.

What nodes write reaches it a moment later, each in its own time: events are counted in the order of time, once they are
older than that moment.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.events.event import Event
from hyperpod_ext.runtime.metrics.exporter import MetricsExporter

_HELD_S = 2.0
_LOOK_S = 0.25


class Numbers:
    """Counts and shows, in a thread of its own.

    Args:
        past: events of before, by this machine's clock.
        event: takes what is worth an event.
    """

    def __init__(self, config: RuntimeConfig, past: Iterable[Event], event: Callable[..., None]) -> None:
        self._waiting: list[tuple[float, int, Event]] = []
        self._order, self._lock = itertools.count(), threading.Lock()
        self._exporter = MetricsExporter(config, past, event)
        threading.Thread(target=lambda: asyncio.run(self._serve()), name="numbers", daemon=True).start()

    def take(self, events: Iterable[Event]) -> None:
        """Events of a node, by this machine's clock. From any thread."""
        with self._lock:
            for event in events:
                heapq.heappush(self._waiting, (event.t, next(self._order), event))

    async def _serve(self) -> None:
        self._exporter.open()
        while True:
            for event in self._due():
                self._exporter.add(event)
            await asyncio.sleep(_LOOK_S)

    def _due(self) -> list[Event]:
        until, due = time.monotonic() - _HELD_S, []
        with self._lock:
            while self._waiting and self._waiting[0][0] <= until:
                due.append(heapq.heappop(self._waiting)[2])
        return due
