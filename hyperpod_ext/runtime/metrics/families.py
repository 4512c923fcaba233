"""Metrics in Prometheus' text format 0.0.4. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric, with its labels."""

    value: float
    labels: Labels = ()
    suffix: str = ""
    """Suffix to the metric's name, for a histogram: `_bucket`, `_sum` or `_count`."""


@dataclass(frozen=True, slots=True)
class Family:
    """All values of one metric, with its name, kind and help text."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[Sample, ...]


@dataclass(slots=True)
class Histogram:
    """Number of observed values by upper bound (bucket). The histogram has a fixed size, however long the job runs."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value in its bucket."""
        self.sum += value
        for index, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[index] += 1
                return
        self.counts[-1] += 1

    def samples(self) -> tuple[Sample, ...]:
        """Return the histogram's samples. A bucket also counts all lower buckets, as Prometheus expects."""
        made, total = [], 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            made.append(Sample(total, (("le", _number(bound)),), "_bucket"))
        return (*made, Sample(self.sum, suffix="_sum"), Sample(total, suffix="_count"))


def gauge(name: str, help: str, value: float | None) -> Family:
    """Return a metric that may rise and fall. If `value` is None, the metric has no sample, instead of the value 0."""
    return Family(name, "gauge", help, () if value is None else (Sample(value),))


def counter(name: str, help: str, values: Mapping[Labels, float] | float) -> Family:
    """Return a metric that only rises. `values`: one value, or a value for each set of labels."""
    if not isinstance(values, Mapping):
        return Family(name, "counter", help, (Sample(values),))
    return Family(name, "counter", help, tuple(Sample(value, labels) for labels, value in sorted(values.items())))


def render(families: Iterable[Family], labels: Labels = ()) -> str:
    """Return the metrics as text, with `labels` added to every sample. Values that are not finite are left out.

    Only the bound +Inf of a histogram's last bucket is kept."""
    lines = []
    for family in families:
        samples = [sample for sample in family.samples if math.isfinite(sample.value)]
        if not samples:
            continue
        lines += [f"# HELP {family.name} {_escaped(family.help)}", f"# TYPE {family.name} {family.kind}"]
        for sample in samples:
            labelled = ",".join(f'{name}="{_quoted(value)}"' for name, value in (*labels, *sample.labels))
            lines.append(f"{family.name}{sample.suffix}{{{labelled}}} {_number(sample.value)}")
    return "\n".join([*lines, ""])


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
