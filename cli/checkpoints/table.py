"""Formats sizes, ages, counts and ranks as text. Pure."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def size(nbytes: float) -> str:
    """Return a number of bytes as text, in the largest unit in which it is at least 1, such as `2.5 GiB`."""
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def age(seconds: float | None) -> str:
    """Return a number of seconds as text, in the largest unit in which it is at least 2, such as `3 h`; `-` for
    None."""
    if seconds is None:
        return "-"
    for length, unit in _AGES:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def ranks(numbers: list[int]) -> str:
    """Return rank numbers as text with ranges, such as `0-3,5`."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
