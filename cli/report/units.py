"""Texts of durations: two or three digits, and a unit that fits. Pure."""

from __future__ import annotations

from hyperpod_ext.planner.advice_model import three_digits

_UNITS = (("hours", "h", 3600.0), ("minutes", "min", 60.0), ("seconds", "s", 1.0))
_MOST = 999.5
"""A number of 1,000 seconds or minutes is shown in the next larger unit."""


def duration(seconds: float) -> str:
    """Return a duration as text, such as `0 s`, `0.250 s`, `12.5 s` or `16.7 min`."""
    if not seconds:
        return "0 s"
    _, unit, size = _unit(seconds)
    return f"{three_digits(seconds / size)} {unit}"


def axis_unit(seconds: float) -> tuple[str, float]:
    """Return the unit for a time axis of the given length: its name, and its length in seconds."""
    name, _, size = _unit(seconds)
    return name, size


def _unit(seconds: float) -> tuple[str, str, float]:
    return next((unit for unit in _UNITS[:0:-1] if abs(seconds) / unit[2] < _MOST), _UNITS[0])
