"""A job as spans: the tree, and what a collector of OpenTelemetry gets over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from made_events import made
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.metrics.tracing import Traced, is_asked_for, send, trace

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


def test_a_recovery_lasts_until_the_slowest_rank_has_made_its_first_step():
    root = trace(EVENTS, "tiny")
    assert root is not None
    assert (root.name, root.began, root.ended, root.attributes["hpx.state"]) == ("job tiny", 0.0, 9.0, "succeeded")
    (recovery,) = root.inside
    assert (recovery.began, recovery.ended, recovery.attributes["hpx.escalation_level"]) == (3.5, 8.0, "process")
    of_rank_0 = [(part.name, part.began, part.ended) for part in recovery.inside if part.attributes["hpx.rank"] == 0]
    assert of_rank_0 == [
        ("abort rank 0", 3.5, 4.0),
        ("agree rank 0", 4.0, 5.0),
        ("rebuild rank 0", 5.0, 6.0),
        ("first_step rank 0", 6.0, 7.0),
    ]


def test_no_events_are_no_spans_and_a_fault_at_the_end_is_a_recovery_that_never_came():
    assert trace(Events(), "tiny") is None
    cut = trace(Events(EVENTS[:10]), "tiny")
    assert cut is not None
    assert [(recovery.began, recovery.ended) for recovery in cut.inside] == [(3.5, 4.0)]


def test_a_collector_gets_the_tree(collector: Collector):
    assert is_asked_for()
    root = trace(EVENTS, "tiny")
    assert root is not None
    send(root, epoch=1e9)
    spans = {span.name: span for span in collector.spans}
    job, recovery, first = spans["job tiny"], spans["recovery"], spans["first_step rank 1"]
    assert (recovery.parent_span_id, first.parent_span_id) == (job.span_id, recovery.span_id)
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (int(1e18 + 6e9), int(1e18 + 8e9))
    assert {a.key: a.value.string_value for a in recovery.attributes}["hpx.cause"] == "killed"


def test_more_than_one_request_holds_loses_none(collector: Collector):
    parts = tuple(Traced(f"part {number}", 1.0, 2.0, {}) for number in range(3000))
    send(Traced("job big", 0.0, 3.0, {}, parts), epoch=0.0)
    assert len({span.name for span in collector.spans}) == 3001


@pytest.mark.parametrize("collector", [400], indirect=True)
def test_a_collector_that_refuses_is_told(collector: Collector):
    with pytest.raises(ConnectionError):
        send(Traced("job big", 0.0, 3.0, {}), epoch=0.0)
