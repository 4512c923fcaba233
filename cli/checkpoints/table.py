"""Sizes, ages and rows, as people read them. Pure."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def size(nbytes: float) -> str:
    """In the unit that leaves at most four digits."""
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def age(seconds: float | None) -> str:
    """In its largest unit."""
    if seconds is None:
        return "-"
    for length, unit in _AGES:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def ranks(numbers: list[int]) -> str:
    """0-3,5"""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def count(number: int, what: str) -> str:
    """1 file, 2 files"""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
