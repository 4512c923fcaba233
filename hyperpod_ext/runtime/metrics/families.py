"""Metrics as Prometheus reads them, text format 0.0.4. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One number."""

    value: float
    labels: Labels = ()
    suffix: str = ""
    """What is added to the family's name: `_bucket`, `_sum` or `_count` of a histogram."""


@dataclass(frozen=True, slots=True)
class Family:
    """Numbers of one name."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[Sample, ...]


@dataclass(slots=True)
class Histogram:
    """Counts of what was observed, by upper bounds. Of fixed size, however long the job runs."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Add one."""
        self.sum += value
        for index, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[index] += 1
                return
        self.counts[-1] += 1

    def samples(self) -> tuple[Sample, ...]:
        """Buckets hold what is at most their bound, those below included."""
        made, total = [], 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            made.append(Sample(total, (("le", _number(bound)),), "_bucket"))
        return (*made, Sample(self.sum, suffix="_sum"), Sample(total, suffix="_count"))


def gauge(name: str, help: str, value: float | None) -> Family:
    """One number that goes up and down; none yet is no sample, not zero."""
    return Family(name, "gauge", help, () if value is None else (Sample(value),))


def counter(name: str, help: str, values: Mapping[Labels, float] | float) -> Family:
    """What only rises."""
    if not isinstance(values, Mapping):
        return Family(name, "counter", help, (Sample(values),))
    return Family(name, "counter", help, tuple(Sample(value, labels) for labels, value in sorted(values.items())))


def render(families: Iterable[Family], labels: Labels = ()) -> str:
    """The text, with `labels` on every sample. What is not finite is left out, but for the bound of the last bucket."""
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
