"""Draws charts as SVG with a caption, without scripts, fonts or network access. Pure.

Colours are set by CSS classes of the page, so that charts follow the page's light or dark mode. The page sets the size
of text, too: on a phone, text is larger in relation to the chart. Labels of axes are in the caption, because their text
would not fit into a chart as narrow as a phone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from hyperpod_ext.planner.advice_model import phase_name

from .units import axis_unit, duration

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 76, 26, 22, 34
_MOST_POINTS = 800

Points = Sequence[tuple[float, float]]


def stacked(shares: Mapping[str, Sequence[float]], part_s: float, from_s: float = 0.0, height: int = 300) -> str:
    """Return a chart with the shares of phases in the job's time, as stacked bars.

    Args:
        shares: for each phase, its share in each interval, from 0 to 1.
        part_s: length of an interval in seconds.
        from_s: seconds from the start of the job to its first step, where the time axis begins.
        height: height of the chart in pixels.
    """
    parts = max((len(each) for each in shares.values()), default=0)
    length_s = parts * part_s - from_s
    if not parts or part_s <= 0 or length_s <= 0:
        return ""
    unit, unit_s = axis_unit(length_s)
    frame = _Frame((0.0, length_s / unit_s), (0.0, 1.0), height)
    base = [0.0] * parts
    bodies = []
    for phase, each in shares.items():
        top = [below + share for below, share in zip(base, each, strict=True)]
        for index in (i for i, share in enumerate(each) if share > 0 and (i + 1) * part_s > from_s):
            began = max(0.0, index * part_s - from_s)
            left, right = frame.x(began / unit_s), frame.x(((index + 1) * part_s - from_s) / unit_s)
            upper, lower = frame.y(min(1.0, top[index])), frame.y(min(1.0, base[index]))
            about = f"{phase_name(phase)}: {100 * each[index]:.1f} % after {duration(began)}"
            bodies.append(_bar(phase, left, right, upper, lower, about))
        base = top
    caption = f"% of all ranks' time, by {unit} since the first step"
    return frame.around("".join(bodies), caption, lambda share: f"{100 * share:.0f}")


def timeline(rows: Mapping[str, Sequence[tuple[str, float, float]]], seconds: float) -> str:
    """Return a chart with a row for each rank, which shows the rank's phases over time.

    Args:
        rows: the phases of each rank, with start and duration in seconds, by the rank's name.
        seconds: length of the time axis in seconds.
    """
    if not rows or seconds <= 0:
        return ""
    name, bar, gap = 26, 26, 4
    unit, unit_s = axis_unit(seconds)
    height = BOTTOM + len(rows) * (name + bar + gap)
    frame = _Frame((0.0, seconds / unit_s), (0.0, 1.0), height, left=RIGHT)
    bodies = []
    for index, (rank, pieces) in enumerate(rows.items()):
        top = index * (name + bar + gap) + name
        bodies.append(_text(RIGHT, top - 4, rank, "start"))
        for phase, began, took in pieces:
            about = f"{rank}, {phase_name(phase)}: {duration(took)}"
            left, right = (frame.x(at / unit_s) for at in (began, began + took))
            bodies.append(_bar(phase, left, right, top, top + bar, about))
    return frame.around("".join(bodies), f"{unit} since the fault", None)


def lines(
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    marks: Mapping[float, str],
    *,
    height: int = 300,
    from_zero: bool = True,
) -> str:
    """Return a line chart. Values that are not finite are left out.

    Args:
        series: points of each line, by the line's CSS class.
        marks: texts of vertical marks, by their position on the x axis.
        from_zero: whether the y axis begins at 0.
    """
    known = [point for points in series.values() for point in points if math.isfinite(point[1])]
    if not known:
        return ""
    across, up = [x for x, _ in known], [y for _, y in known]
    frame = _Frame((min(across), max(across)), (min(0.0, *up) if from_zero else min(up), max(up)), height)
    bodies = []
    for at, about in marks.items():
        if min(across) <= at <= max(across):
            x = frame.x(at)
            line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
            bodies.append(f"<g><title>{escape(about)}</title>{line}</g>")
    for name, points in series.items():
        drawn = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in thinned(points) if math.isfinite(y))
        bodies.append(f'<polyline class="line {name}" points="{drawn}"/>')
    return frame.around("".join(bodies), f"{y_label}, by {x_label}", _number)


def thinned(points: Points) -> list[tuple[float, float]]:
    """Return fewer points of a long series: the lowest and the highest point of each group of neighbouring points. The
    chart of the fewer points still shows every spike."""
    each = -(-2 * len(points) // _MOST_POINTS)
    if each <= 2:
        return list(points)
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), each):
        some = points[begin : begin + each]
        kept += sorted({min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])})
    return kept


def _bar(phase: str, left: float, right: float, upper: float, lower: float, about: str) -> str:
    size = f'x="{left:.2f}" y="{upper:.2f}" width="{max(0.3, right - left):.2f}" height="{lower - upper:.2f}"'
    return f'<rect class="p-{phase}" {size}><title>{escape(about)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


class _Frame:
    """The axes of a chart, which convert values to positions in the chart."""

    def __init__(self, across: tuple[float, float], up: tuple[float, float], height: int, left: int = LEFT) -> None:
        self._across, self._up, self._height, self._left = across, up, height, left

    def x(self, value: float) -> float:
        low, high = self._across
        return self._left + (value - low) / ((high - low) or 1.0) * (WIDTH - self._left - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._up
        return self._height - BOTTOM - (value - low) / ((high - low) or 1.0) * (self._height - TOP - BOTTOM)

    def around(self, body: str, caption: str, y_text: object) -> str:
        """Return the whole chart: `body` with the axes around it, and its caption. The y axis has no ticks if `y_text`
        is None."""
        parts = [f'<svg viewBox="0 0 {WIDTH} {self._height}" role="img">']
        for tick in ticks(*self._across):
            x = self.x(tick)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{self._height - BOTTOM}"/>')
            parts.append(_text(x, self._height - BOTTOM + 24, _number(tick), "middle"))
        for tick in ticks(*self._up, wanted=4) if callable(y_text) else []:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{self._left}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(self._left - 8, y + 4, y_text(tick) if callable(y_text) else "", "end"))
        return "".join([*parts, body, "</svg>", f"<figcaption>{escape(caption)}</figcaption>"])


def ticks(low: float, high: float, wanted: int = 8) -> list[float]:
    """Return about `wanted` round numbers between `low` and `high`, for the ticks of an axis."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.6g}"
