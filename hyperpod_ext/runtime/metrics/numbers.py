"""Metrics of a job that no agent of ours coordinates. Node 0's memory server exports them, from the events of all
nodes.

Events of nodes arrive a moment later, with different delays. Events are counted in order of time, once they are older
than that delay.
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
    """Counts events and exports metrics, in a thread of its own.

    Args:
        past: earlier events, with times by this machine's clock.
        event: logs an event.
    """

    def __init__(self, config: RuntimeConfig, past: Iterable[Event], event: Callable[..., None]) -> None:
        self._waiting: list[tuple[float, int, Event]] = []
        self._order, self._lock = itertools.count(), threading.Lock()
        self._exporter = MetricsExporter(config, past, event)
        threading.Thread(target=lambda: asyncio.run(self._serve()), name="numbers", daemon=True).start()

    def take(self, events: Iterable[Event]) -> None:
        """Add events of a node, with times by this machine's clock. Any thread may call this."""
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
