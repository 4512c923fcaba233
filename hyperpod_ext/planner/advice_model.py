"""The class of advice, functions that read measurements from a job's report, and texts of measurements. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MATTERS = 0.001
"""Share of a job's time that a problem must cost at least before a rule gives advice."""
FEW = 3
"""Minimum number of faults from which a rule computes a fault rate."""

PHASE_NAMES = {
    "fault_seen": "detect",
    "survivors_freed": "abort",
    "new_member": "agree",
    "groups_back": "rebuild",
    "state_back": "restore",
    "first_new_step": "first step",
    "startup": "start-up",
}
"""Names of phases that differ from the phase's key in report.json. A phase of a recovery has the same name as the
corresponding phase of the ranks' time."""

JobReport = Mapping[str, Any]
"""Report of a job, as `runtime.events.report.make_report` returns it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice about a job."""

    rule: str
    """Name of the rule that gives the advice. Names of rules never change, so that scripts can rely on the names."""
    text: str
    """The measurement and the recommended change, as text."""
    gain_s: float = 0.0
    """Seconds that the recommended change would have saved in this job. 0: unknown."""

    def to_json(self, usd_per_hour: float | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {"rule": self.rule, "text": self.text, "gain_s": round(self.gain_s, 4)}
        return found if usd_per_hour is None else found | {"gain_usd": round(self.gain_s / 3600 * usd_per_hour, 2)}


def phase_name(phase: str) -> str:
    """Return the name of a phase, as texts and charts show it, from its key in report.json."""
    return PHASE_NAMES.get(phase, phase.replace("_", " "))


def three_digits(value: float) -> str:
    """Return a number as text with about three significant digits: 3 decimals below 1, 2 below 10, 1 below 100,
    otherwise none."""
    size = abs(value)
    return f"{value:.{3 if size < 0.9995 else 2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def wall_of(report: JobReport) -> float:
    """Return the seconds from the start of the job's agents to the end of the job. 0: unknown."""
    return float(report["seconds"].get("wall") or 0.0)


def seconds_of(report: JobReport, phase: str) -> float:
    """Return the seconds that a rank spent in the phase `phase`, as the mean over all ranks."""
    ranks = report.get("phases") or {}
    return sum(float(each.get(phase, 0.0)) for each in ranks.values()) / max(1, len(ranks))
