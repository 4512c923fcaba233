"""Counts the events of a job in this process, and exports the metrics. An error in the metrics never makes the job
fail."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.events.event import Event, Other
from hyperpod_ext.runtime.metrics.endpoint import metrics_server
from hyperpod_ext.runtime.metrics.families import render
from hyperpod_ext.runtime.metrics.meters import Meters
from hyperpod_ext.runtime.metrics.summary import summary


class MetricsExporter:
    """The meters of a job, and the HTTP endpoint that exports them.

    Args:
        config: configuration of the job. `metrics` has host and port; `name` is the label `hpx_job` of every metric.
        past: events that earlier coordinators have logged, so that counters continue. Past events are read in a thread
            after `open`: a long job has many, and meanwhile this process must send heartbeats to other nodes.
        event: logs an event with the address of the endpoint, or with the reason why there is no endpoint.
    """

    def __init__(self, config: RuntimeConfig, past: Iterable[Event], event: Callable[..., None]) -> None:
        assert config.metrics is not None
        self._config, self._event = config.metrics, event
        self._labels = (("hpx_job", config.name),)
        peers = ["peer"] if config.checkpoint.peer() is not None else []
        self._tiers = [*peers, *(tier.url(config.name) for tier in config.checkpoint.durable())]
        self._epoch = time.time() - time.monotonic()
        self._past = past
        self._meters: Meters | None = Meters.before_any_copy(self._tiers)
        self._waiting: list[Event] | None = []
        """Events that arrived while `past` was being counted; None when `past` is counted."""
        self._server = metrics_server(self.text, self.summary, self._failed)
        self._opening: asyncio.Task[None] | None = None

    def add(self, event: Event) -> None:
        """Count one new event of the log."""
        if self._meters is None:
            return
        if why := _why_not(event):
            self._stop(why)
        elif self._waiting is not None:
            self._waiting.append(event)
        else:
            self._meters.add(event)

    def text(self) -> str:
        """Return the metrics in Prometheus' text format; empty if an event could not be counted."""
        return render(self._meters.families(self._epoch), self._labels) if self._meters is not None else ""

    def summary(self) -> str:
        """Return the values that `hp-ext top` shows, as JSON."""
        return json.dumps(summary(self._meters)) if self._meters is not None else "{}"

    def open(self) -> None:
        """Start to count past events and to listen. The method returns at once."""
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._opening is not None:
            await self._opening
        await self._server.close()

    async def _open(self) -> None:
        meters, why = await asyncio.to_thread(_counted, self._tiers, self._past)
        waiting, self._waiting, self._past = self._waiting or [], None, ()
        if why and self._meters is not None:
            self._stop(why)
        elif self._meters is not None:
            self._meters = meters
            for event in waiting:
                meters.add(event)
        host, port = self._config.host, self._config.port
        try:
            port = await self._server.listen(host, port)
        except OSError as error:
            self._failed(f"cannot listen on {host}:{port} ({error.strerror}); set metrics.port to another one, or to 0")
            return
        self._event("metrics_shown", host=host, port=port)

    def _stop(self, why: str) -> None:
        """Stop exporting metrics, because the metrics would be wrong. `why`: the reason, for the log."""
        self._meters = None
        self._failed(why)

    def _failed(self, why: str) -> None:
        sys.stderr.write(f"the job's metrics are not exported: {why}\n")
        self._event("metrics_failed", cause=why)


def _counted(tiers: Iterable[str], events: Iterable[Event]) -> tuple[Meters, str]:
    """Return meters for these events, and the reason why an event cannot be counted (empty if all events were
    counted)."""
    meters = Meters.before_any_copy(tiers)
    for event in events:
        if why := _why_not(event):
            return meters, why
        meters.add(event)
    return meters, ""


def _why_not(event: Event) -> str:
    """Return why an event cannot be counted; empty if it can be counted."""
    return f"an event is not as declared: {event.why}" if isinstance(event, Other) and event.why else ""
