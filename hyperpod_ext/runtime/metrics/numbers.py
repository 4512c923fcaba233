"""Metrics of a job without our agent. The memory server of node 0 computes these metrics from the events of all nodes.

Events of other nodes arrive with different delays. Therefore events wait until they are older than the longest delay,
and are then counted in order of time.
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
    """Counts events and exports the metrics, in a thread of its own.

    Args:
        past: events before now, with times by this machine's clock.
        event: function that logs an event.
    """

    def __init__(self, config: RuntimeConfig, past: Iterable[Event], event: Callable[..., None]) -> None:
        self._waiting: list[tuple[float, int, Event]] = []
        self._order, self._lock = itertools.count(), threading.Lock()
        self._exporter = MetricsExporter(config, past, event)
        threading.Thread(target=lambda: asyncio.run(self._serve()), name="numbers", daemon=True).start()

    def take(self, events: Iterable[Event]) -> None:
        """Add new events of one node, with times by this machine's clock. Any thread may call this method."""
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
