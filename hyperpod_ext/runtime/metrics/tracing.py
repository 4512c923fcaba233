"""The job and its recoveries as OpenTelemetry spans, sent when it has ended. Only where it is asked for.

What OpenTelemetry's own variables say holds: OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS, OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.of_faults import Fault
from hyperpod_ext.runtime.events.of_training import Generation, JobEnded, Step
from hyperpod_ext.runtime.events.phases import spans_by_rank

_ASKED_BY = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_AT_ONCE = 512
"""Spans in one request."""
_OF_A_RECOVERY = frozenset({"detect", "abort", "agree", "rebuild", "restore", "first_step", "lost_work"})

Value = str | int | float


@dataclass(frozen=True, slots=True)
class Traced:
    """A span to be. Times are seconds of the log's clock."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, Value]
    inside: tuple[Traced, ...] = ()


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody collects spans."""
    return any(environ.get(name) for name in _ASKED_BY)


def trace(events: Events, job: str) -> Traced | None:
    """The job as a tree: itself, its recoveries, and in each the phases of every rank. None without events. Pure."""
    if not events:
        return None
    windows = _recoveries(events)
    inside: list[list[Traced]] = [[] for _ in windows]
    for rank, own in spans_by_rank(events):
        for span in own:
            if span.phase not in _OF_A_RECOVERY:
                continue
            for index, (fault, until) in enumerate(windows):
                if span.ended > fault.t and span.began < until:
                    began, ended = max(span.began, fault.t), min(span.ended, until)
                    inside[index].append(Traced(f"{span.phase} rank {rank}", began, ended, {"hpx.rank": rank}))
                    break
    recoveries = tuple(
        Traced("recovery", fault.t, until, _attributes(fault), tuple(parts))
        for (fault, until), parts in zip(windows, inside, strict=True)
    )
    end = events.first(JobEnded)
    state = "unknown" if end is None else end.state
    return Traced(f"job {job}", events.start, events.end, {"hpx.job": job, "hpx.state": state}, recoveries)


def _attributes(fault: Fault) -> dict[str, Value]:
    shown = fault.model_dump(include={"rank", "node", "step", "cause", "kind", "escalation_level"})
    return {f"hpx.{name}": value for name, value in shown.items()}


def _recoveries(events: Events) -> list[tuple[Fault, float]]:
    """Each first fault, and when every rank that goes on has made its first step after it."""
    windows: list[tuple[Fault, float]] = []
    first: Fault | None = None
    generation, ranks, made = 0, 0, dict[int, float]()
    for event in sorted(events, key=lambda event: event.t):
        match event:
            case Fault():
                first, made = first or event, {}
            case Generation():
                generation, ranks, made = event.generation, event.world_size or 0, {}
            case Step() if first is not None and event.generation == generation:
                made.setdefault(event.rank, event.t)
                if len(made) >= ranks:
                    windows.append((first, max(made.values())))
                    first = None
    return windows if first is None else [*windows, (first, events.end)]


def send(root: Traced, epoch: float) -> None:
    """Send a tree to the collector. `epoch`: Unix time at 0 of the log's clock, in seconds.

    Raises:
        ImportError: OpenTelemetry is not installed.
        ConnectionError: the collector did not take them, within the time that OpenTelemetry gives it.
    """
    from opentelemetry import trace as api
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    made = InMemorySpanExporter()  # a batch processor would drop what is beyond its queue
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "hyperpod_ext"}))
    provider.add_span_processor(SimpleSpanProcessor(made))
    tracer = provider.get_tracer("hyperpod_ext")

    def at(moment: float) -> int:
        return int((moment + epoch) * 1e9)

    def add(traced: Traced, parent: Any) -> None:
        span = tracer.start_span(traced.name, parent, attributes=dict(traced.attributes), start_time=at(traced.began))
        for each in traced.inside:
            add(each, api.set_span_in_context(span))
        span.end(at(traced.ended))

    add(root, None)
    exporter: Any = OTLPSpanExporter()
    spans = made.get_finished_spans()
    for begin in range(0, len(spans), _AT_ONCE):
        if exporter.export(spans[begin : begin + _AT_ONCE]) is not SpanExportResult.SUCCESS:
            raise ConnectionError("the collector did not take them")
    exporter.shutdown()
