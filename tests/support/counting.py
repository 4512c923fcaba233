"""A process that counts a job's events and shows them, as the coordinator or node 0's memory server does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from made_events import events_of
from waiting import PATIENCE_S

from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.metrics import Metrics
from hyperpod_ext.runtime.metrics.exporter import MetricsExporter


@contextmanager
def counting(entries: Iterable[dict[str, Any]], host: str = "127.0.0.1") -> Iterator[int]:
    """Serves the numbers of job `a` at `host`; gives the port."""
    metrics = Metrics(host=host, port=0)
    config = RuntimeConfig(name="a", nodes=1, workers_per_node=1, checkpoint=CheckpointPolicy(), metrics=metrics)
    ports: list[int] = []
    there, end = threading.Event(), threading.Event()

    def told(event: str, **fields: Any) -> None:
        ports.append(fields["port"])
        there.set()

    async def serve() -> None:
        exporter = MetricsExporter(config, events_of(entries), told)
        exporter.open()
        await asyncio.to_thread(end.wait)
        await exporter.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert there.wait(PATIENCE_S)
        yield ports[0]
    finally:
        end.set()
        thread.join()
