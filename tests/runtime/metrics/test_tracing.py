"""A job as spans: the tree, and what a collector of OpenTelemetry gets over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from made_events import made
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from waiting import until

from hyperpod_ext.runtime.events.event import Event, Events
from hyperpod_ext.runtime.events.of_faults import Fault
from hyperpod_ext.runtime.metrics.tracing import Recoveries, Trace, Traced, TraceSender, is_asked_for

EVENTS = Events(
    [
        made(0.0, "job_started", world_size=2),
        *(made(1.0, "joined", rank=rank) for rank in (0, 1)),
        made(1.0, "generation", generation=1, step=0, world_size=2),
        *(made(2.0, "begun", rank=rank, step=0, generation=1) for rank in (0, 1)),
        *(made(3.0, "step", rank=rank, step=1, began=2.0, generation=1) for rank in (0, 1)),
        made(
            3.5,
            "fault",
            rank=1,
            node=0,
            step=2,
            cause="killed",
            kind="signal",
            escalation_level="process",
        ),
        made(4.0, "aborted", rank=0),
        made(4.5, "worker_started", rank=1),
        *(made(5.0, "joined", rank=rank) for rank in (0, 1)),
        made(5.0, "generation", generation=2, step=1, world_size=2),
        *(made(6.0, "begun", rank=rank, step=1, generation=2) for rank in (0, 1)),
        *(made(7.0 + rank, "step", rank=rank, step=2, began=6.0, generation=2) for rank in (0, 1)),
        *(made(7.0 + rank, "done", rank=rank) for rank in (0, 1)),
        made(9.0, "job_ended", state="succeeded"),
    ]
)


class Collector:
    """What was sent to it."""

    def __init__(self, status: int) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                plain = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                sent = ExportTraceServiceRequest.FromString(plain)
                collector.spans += [s for r in sent.resource_spans for scope in r.scope_spans for s in scope.spans]
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(params=[200])
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    opened = Collector(request.param)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", opened.url)
    yield opened
    opened.close()


def recoveries_of(events: Iterable[Event]) -> list[Traced]:
    recoveries = Recoveries()
    return [found for event in events if (found := recoveries.add(event)) is not None]


def test_a_recovery_lasts_until_the_slowest_rank_has_made_its_first_step():
    (recovery,) = recoveries_of(EVENTS)
    assert (recovery.began, recovery.ended, recovery.attributes["hpx.escalation_level"]) == (3.5, 8.0, "process")
    of_rank_0 = [(part.name, part.began, part.ended) for part in recovery.inside if part.attributes["hpx.rank"] == 0]
    assert of_rank_0 == [
        ("abort rank 0", 3.5, 4.0),
        ("agree rank 0", 4.0, 5.0),
        ("rebuild rank 0", 5.0, 6.0),
        ("first_step rank 0", 6.0, 7.0),
    ]


def test_a_fault_that_ends_the_job_is_a_recovery_that_never_came():
    assert recoveries_of([]) == []
    cut = recoveries_of([*EVENTS[:10], made(9.0, "job_ended", state="failed")])
    assert [(recovery.began, recovery.ended) for recovery in cut] == [(3.5, 9.0)]


def test_a_recovery_is_sent_when_it_ends_and_the_job_when_it_ends(collector: Collector):
    assert is_asked_for()
    sender = TraceSender("run 1", "tiny")
    *until_recovered, done, also_done, ended = EVENTS
    for event in until_recovered:
        sender.add(event)
    until(lambda: any(span.name == "recovery" for span in collector.spans))
    assert not any(span.name == "job tiny" for span in collector.spans)
    for event in (done, also_done, ended):
        sender.add(event)
    sender.close()
    spans = {span.name: span for span in collector.spans}
    job, recovery, first = spans["job tiny"], spans["recovery"], spans["first_step rank 1"]
    assert (recovery.parent_span_id, first.parent_span_id) == (job.span_id, recovery.span_id)
    assert {span.trace_id for span in collector.spans} == {job.trace_id}
    assert first.end_time_unix_nano - first.start_time_unix_nano == pytest.approx(2e9, rel=1e-3)
    assert {a.key: a.value.string_value for a in recovery.attributes}["hpx.cause"] == "killed"
    assert {a.key: a.value.string_value for a in job.attributes}["hpx.state"] == "succeeded"


def test_another_coordinator_goes_on_with_the_same_trace_and_sends_no_recovery_twice(collector: Collector):
    fault = next(index for index, event in enumerate(EVENTS) if isinstance(event, Fault))
    for past, events in ((EVENTS[: fault + 1], EVENTS[fault + 1 :]), (EVENTS[:-1], EVENTS[-1:])):
        sender = TraceSender("run 1", "tiny", past)
        for event in events:
            sender.add(event)
        sender.close()
    assert [span.name for span in collector.spans].count("recovery") == 1
    assert len({span.trace_id for span in collector.spans}) == 1
    (parent,) = {span.parent_span_id for span in collector.spans if span.name == "recovery"}
    assert {span.span_id for span in collector.spans if span.name == "job tiny"} == {parent}


def test_more_than_one_request_holds_loses_none(collector: Collector):
    parts = tuple(Traced(f"part {number}", 1.0, 2.0, {}) for number in range(3000))
    Trace("run 1", epoch=0.0).send(Traced("recovery", 0.0, 3.0, {}, parts), "job")
    assert len({span.name for span in collector.spans}) == 3001


@pytest.mark.parametrize("collector", [400], indirect=True)
def test_a_collector_that_refuses_is_reported_and_nothing_else_fails(
    collector: Collector, capfd: pytest.CaptureFixture[str]
):
    sender = TraceSender("run 1", "tiny")
    for event in EVENTS:
        sender.add(event)
    sender.close()
    assert capfd.readouterr().err.count("spans of the job were not sent: the collector did not accept the spans") == 2
