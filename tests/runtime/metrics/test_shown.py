"""Where the numbers are read: over HTTP, from the process that coordinates, whatever becomes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

from made_events import made
from waiting import PATIENCE_S

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.events.event import Event
from hyperpod_ext.runtime.events.log import checked
from hyperpod_ext.runtime.metrics.exporter import MetricsExporter

TIERS: list[dict[str, Any]] = [{"kind": "memory"}, {"kind": "peer"}, {"kind": "file", "path": "/fsx/runs"}]
HERE = RuntimeConfig.model_validate(
    {
        "name": "tiny",
        "nodes": 1,
        "workers_per_node": 1,
        "metrics": {"host": "127.0.0.1", "port": 0},
        "checkpoint": {"tiers": TIERS},
    },
    strict=False,
)
FAULT = made(1.0, "fault", rank=0, kind="signal", escalation_level="process")
COUNTED = 'hpx_faults_total{hpx_job="tiny",kind="signal",escalation_level="process"}'


class Events(list[dict[str, Any]]):
    """What it told the event log."""

    def write(self, event: str, **fields: Any) -> None:
        self.append({"event": event, **fields})


async def ask(port: int, request: str) -> tuple[str, str]:
    """Status and body of what is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head.partition("\r\n")[0].partition(" ")[2], body


def answers(shown: MetricsExporter, events: Events, *requests: str) -> list[tuple[str, str]]:
    """One after another, each on a line of its own."""

    async def run() -> list[tuple[str, str]]:
        shown.open()
        while not events:
            await asyncio.sleep(0)
        try:
            return [await ask(events[-1]["port"], request) for request in requests]
        finally:
            await shown.close()

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_counters_go_on_where_the_coordinator_before_left_them() -> None:
    events = Events()
    shown = MetricsExporter(HERE, [FAULT], events.write)
    shown.add(FAULT)
    ((status, body),) = answers(shown, events, "GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == "200 OK"
    assert f"{COUNTED} 2" in body.splitlines()


def test_each_counter_exists_before_its_first_count() -> None:
    """Prometheus' increase() sees no first fault in a series that is born at 1."""
    events = Events()
    ((_, body),) = answers(MetricsExporter(HERE, [], events.write), events, "GET /metrics HTTP/1.1\r\n\r\n")
    lines = body.splitlines()
    assert f"{COUNTED} 0" in lines
    assert 'hpx_faults_total{hpx_job="tiny",kind="hang",escalation_level="in process"} 0' in lines
    for tier in ("peer", "/fsx/runs/tiny"):
        assert f'hpx_tier_failures_total{{hpx_job="tiny",tier="{tier}"}} 0' in lines


def test_a_long_past_is_counted_aside_and_before_what_came_meanwhile() -> None:
    events, counted = Events(), threading.Event()

    def past() -> Iterator[Event]:
        assert counted.wait(PATIENCE_S)
        yield FAULT

    async def run() -> str:
        shown = MetricsExporter(HERE, past(), events.write)
        shown.open()
        await asyncio.sleep(0.05)  # of its own accord it would be open by now
        shown.add(FAULT)
        assert not events
        counted.set()
        while not events:
            await asyncio.sleep(0.005)
        try:
            return shown.text()
        finally:
            await shown.close()

    assert f"{COUNTED} 2" in asyncio.run(asyncio.wait_for(run(), PATIENCE_S)).splitlines()


def test_what_else_is_asked_for_is_not_there() -> None:
    events = Events()
    asked = ("POST /metrics HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\n\r\n")
    said = answers(MetricsExporter(HERE, [], events.write), events, *asked)
    assert [status for status, _ in said] == ["405 Method Not Allowed", "404 Not Found"]


def test_an_event_that_cannot_be_counted_ends_the_numbers_and_not_the_job() -> None:
    events = Events()
    shown = MetricsExporter(HERE, [], events.write)
    for _ in range(3):
        shown.add(checked("step", {"rank": 0, "generation": 1, "step": "first", "began": 0.5})[0])
    (event,) = events
    assert event["event"] == "metrics_failed"
    assert "step: field `step` should be a valid integer, not 'first'" in event["cause"]
    assert shown.text() == ""
