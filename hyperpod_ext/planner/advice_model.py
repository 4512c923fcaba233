"""What advice is, and what its rules read of a report. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MATTERS = 0.001
"""Share of a job's time below which nothing is said."""
FEW = 3
"""Faults: of fewer, no rate is told."""

JobReport = Mapping[str, Any]
"""As `runtime.events.report.make_report` has it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change."""

    rule: str
    """Name of the rule, for scripts."""
    text: str
    """What was measured, and what to do about it."""
    gain_s: float = 0.0
    """Seconds of this job that it would have saved; 0: not known."""

    def to_json(self, usd_per_hour: float | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {"rule": self.rule, "text": self.text, "gain_s": round(self.gain_s, 4)}
        return found if usd_per_hour is None else found | {"gain_usd": round(self.gain_s / 3600 * usd_per_hour, 2)}


def wall_of(report: JobReport) -> float:
    """Seconds from the start of the agents to the end of the job; 0: not known."""
    return float(report["seconds"].get("wall") or 0.0)


def seconds_of(report: JobReport, phase: str) -> float:
    """Seconds that a rank spent in a phase, on average."""
    ranks = report.get("phases") or {}
    return sum(float(each.get(phase, 0.0)) for each in ranks.values()) / max(1, len(ranks))
