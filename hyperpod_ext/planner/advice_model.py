"""The model of advice, and functions that read reports. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MATTERS = 0.001
"""Share of a job's time below which a finding gives no advice."""
FEW = 3
"""Minimum number of faults for a rate."""

JobReport = Mapping[str, Any]
"""A report of `runtime.events.report.make_report`."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One recommended change."""

    rule: str
    """Name of the rule, which scripts can match."""
    text: str
    """The measurement, and the change."""
    gain_s: float = 0.0
    """Seconds of this job that the change would have saved; 0: unknown."""

    def to_json(self, usd_per_hour: float | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {"rule": self.rule, "text": self.text, "gain_s": round(self.gain_s, 4)}
        return found if usd_per_hour is None else found | {"gain_usd": round(self.gain_s / 3600 * usd_per_hour, 2)}


def wall_of(report: JobReport) -> float:
    """Return the seconds from the start of the agents to the end of the job; 0: unknown."""
    return float(report["seconds"].get("wall") or 0.0)


def seconds_of(report: JobReport, phase: str) -> float:
    """Return the mean seconds of a rank in a phase."""
    ranks = report.get("phases") or {}
    return sum(float(each.get(phase, 0.0)) for each in ranks.values()) / max(1, len(ranks))
