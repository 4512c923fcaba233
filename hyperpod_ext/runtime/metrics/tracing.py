"""Sends the job and its recoveries as OpenTelemetry spans, each when it ends. Spans are sent only if a collector is
configured.

OpenTelemetry's own variables apply: OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS, OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.runtime.events.event import Event
from hyperpod_ext.runtime.events.of_faults import Fault
from hyperpod_ext.runtime.events.of_training import Generation, JobEnded, Step
from hyperpod_ext.runtime.events.phases import LivePhases, Span

_ASKED_BY = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_AT_ONCE = 512
"""Maximum number of spans in one request to the collector."""
_CLOSE_S = 30.0
_OF_A_RECOVERY = frozenset({"detect", "abort", "agree", "rebuild", "restore", "first_step", "lost_work"})

Value = str | int | float


@dataclass(frozen=True, slots=True)
class Traced:
    """A span to send, and the spans inside it. Times are seconds of the log's clock."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, Value]
    inside: tuple[Traced, ...] = ()


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment names a collector."""
    return any(environ.get(name) for name in _ASKED_BY)


class Recoveries:
    """Builds a tree of spans for each recovery of a job, from the job's events. This object has no side effects, and a
    bounded size.

    A recovery lasts from the first fault until every rank that continues has made its first step after the fault. The
    spans inside a recovery are the phases of every rank.
    """

    def __init__(self) -> None:
        self.began: float | None = None
        """Time of the first event, in seconds; None before the first event."""
        self._phases = LivePhases()
        self._first: Fault | None = None
        self._parts: list[Span] = []
        self._generation, self._ranks, self._made = 0, 0, dict[int, float]()

    def add(self, event: Event) -> Traced | None:
        """Process the next event of the log. Returns the recovery that this event ends, or None."""
        if self.began is None:
            self.began = event.t
        ended = self._phases.add(event)
        if self._first is not None:
            self._parts += (span for span in ended if span.phase in _OF_A_RECOVERY and span.ended > self._first.t)
        match event:
            case Fault():
                self._first, self._made = self._first or event, {}
            case Generation():
                self._generation, self._ranks, self._made = event.generation, event.world_size or 0, {}
            case Step() if self._first is not None and event.generation == self._generation:
                self._made.setdefault(event.rank, event.t)
                if len(self._made) >= self._ranks:
                    return self._end(max(self._made.values()))
            case JobEnded() if self._first is not None:  # the job ended during a recovery
                return self._end(event.t)
        return None

    def _end(self, until: float) -> Traced:
        fault, parts = self._first, self._parts
        assert fault is not None
        self._first, self._parts = None, []
        inside = tuple(
            Traced(f"{span.phase} rank {span.rank}", max(span.began, fault.t), span.ended, {"hpx.rank": span.rank})
            for span in parts
        )
        shown = fault.model_dump(include={"rank", "node", "step", "cause", "kind", "escalation_level"})
        return Traced("recovery", fault.t, until, {f"hpx.{name}": value for name, value in shown.items()}, inside)


class TraceSender:
    """Sends the spans of one job in a thread of its own, so that nothing else waits for the collector.

    Args:
        run: name of the run. All coordinators of a run add spans to the same trace.
        past: events that earlier coordinators have logged, and whose recoveries those coordinators have already sent.
    """

    def __init__(self, run: str, job: str, past: Iterable[Event] = ()) -> None:
        self._run, self._job = run, job
        self._epoch = time.time() - time.monotonic()
        self._events = queue.SimpleQueue[Event | None]()
        self._thread = threading.Thread(target=self._work, args=(past,), name="spans", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Process the next event of the log, in the sender's thread."""
        self._events.put(event)

    def close(self) -> None:
        """Send the remaining spans, within half a minute."""
        self._events.put(None)
        self._thread.join(_CLOSE_S)

    def _work(self, past: Iterable[Event]) -> None:
        recoveries, trace = Recoveries(), None
        for former in past:
            recoveries.add(former)
        while (event := self._events.get()) is not None:
            try:
                if (recovery := recoveries.add(event)) is not None:
                    trace = trace or Trace(self._run, self._epoch)
                    trace.send(recovery, "job")
                if isinstance(event, JobEnded):
                    began = event.t if recoveries.began is None else recoveries.began
                    attributes: dict[str, Value] = {"hpx.job": self._job, "hpx.state": event.state}
                    trace = trace or Trace(self._run, self._epoch)
                    trace.send(Traced(f"job {self._job}", began, event.t, attributes), "", "job")
            except (ImportError, OSError) as error:  # a job must not fail because its spans cannot be sent
                hint = "; pip install 'hyperpod-ext[observability]'" if isinstance(error, ImportError) else ""
                sys.stderr.write(f"spans of the job were not sent: {error}{hint}\n")
        if trace is not None:
            trace.close()


class Trace:
    """An OpenTelemetry trace, sent to a collector. Ids are computed from names, so that several processes can add spans
    to the same trace.

    Args:
        epoch: Unix time in seconds when the log's clock was 0.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """

    def __init__(self, run: str, epoch: float) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._run, self._epoch = run, epoch
        self._exporter: Any = OTLPSpanExporter()
        self._common: dict[str, Any] = {
            "resource": Resource.create({SERVICE_NAME: "hyperpod_ext"}),
            "instrumentation_scope": InstrumentationScope("hyperpod_ext"),
        }

    def send(self, traced: Traced, parent: str, key: str = "") -> None:
        """Send a span and the spans inside it.

        Args:
            parent: key of the span that contains this one; empty if there is none.
            key: name that identifies the span within the trace. By default, the key is made from the span's name and
                start time.

        Raises:
            ConnectionError: the collector did not accept the spans within OpenTelemetry's time limit.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = list(self._spans(traced, parent, key or f"{traced.name} {traced.began:.6f}"))
        for begin in range(0, len(spans), _AT_ONCE):
            if self._exporter.export(spans[begin : begin + _AT_ONCE]) is not SpanExportResult.SUCCESS:
                raise ConnectionError("the collector did not accept the spans")

    def close(self) -> None:
        """Close the connection to the collector."""
        self._exporter.shutdown()

    def _spans(self, traced: Traced, parent: str, key: str) -> Iterator[Any]:
        from opentelemetry.sdk.trace import ReadableSpan

        yield ReadableSpan(
            traced.name,
            context=self._context(key),
            parent=self._context(parent) if parent else None,
            attributes=dict(traced.attributes),
            start_time=int((traced.began + self._epoch) * 1e9),
            end_time=int((traced.ended + self._epoch) * 1e9),
            **self._common,
        )
        for number, each in enumerate(traced.inside):
            yield from self._spans(each, key, f"{key}/{number} {each.name}")

    def _context(self, key: str) -> Any:
        from opentelemetry.trace import SpanContext, TraceFlags

        trace_id = int.from_bytes(hashlib.sha256(self._run.encode()).digest()[:16], "big")
        span_id = int.from_bytes(hashlib.sha256(f"{self._run}\0{key}".encode()).digest()[:8], "big")
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
