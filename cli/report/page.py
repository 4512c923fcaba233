"""Writes the report of a job as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import charts

_ORDER: tuple[str, ...] = (
    "step",
    "first_step",
    "data",
    "checkpoint",
    "lost_work",
    "detect",
    "abort",
    "agree",
    "rebuild",
    "restore",
)
_ORDER += ("startup", "idle")
"""Order of phases in the stacked bars, from the bottom up. Kept steps come first, because the height of their bar shows
the goodput."""
NOTHING_TO_CHANGE = "Nothing: no figure of this run suggests a change."
_MOST_ROWS = 64
_MOST_TIMELINES = 40


def make_page(result: Mapping[str, Any]) -> str:
    """Return the HTML page for a job's result, which includes `advice`.

    Figures are `<data>` elements. `data-key` is the name of the field in the JSON report, and `value` is its value.
    """
    from hyperpod_ext.jobs.contract.render import render

    over_time = result.get("over_time") or {"part_s": 0.0, "shares": {}}
    phases, shares = result.get("phases") or {}, over_time["shares"]
    seen = {phase for of_rank in phases.values() for phase, seconds in of_rank.items() if seconds}
    order = [*(phase for phase in _ORDER if phase in seen), *sorted(seen - set(_ORDER))]
    shown = result["recoveries"][:_MOST_TIMELINES]
    return render(
        "report/page.html.j2",
        result=result,
        nothing=NOTHING_TO_CHANGE,
        figures=_figures(result),
        over_time=charts.stacked({phase: shares[phase] for phase in order if phase in shares}, over_time["part_s"])
        if shares
        else "",
        phases=order,
        ranks=dict(list(phases.items())[:_MOST_ROWS]),
        more_ranks=max(0, len(phases) - _MOST_ROWS),
        recoveries=[{**recovery, "chart": _timeline(recovery)} for recovery in shown],
        more_recoveries=len(result["recoveries"]) - len(shown),
        loss=_loss(result),
        tiers=result.get("tiers") or [],
        ages=_ages(result.get("tiers") or []),
        traffic=result.get("traffic") or {},
        wall=result["seconds"].get("wall") or 0.0,
    )


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str, Any, str]]:
    """Return the figures for the head of the page, each with label, key, value and text."""
    seconds = result["seconds"]
    rows: list[tuple[str, str, Any, str]] = []
    rows.append(("goodput", "goodput", result["goodput"], f"{100 * result['goodput']:.2f} %"))
    if undisturbed := result["undisturbed"]:
        goodput = undisturbed["goodput"]
        rows.append(("the run without faults", "undisturbed.goodput", goodput, f"{100 * goodput:.2f} %"))
    rows.append(("steps", "steps", result["steps"], str(result["steps"])))
    rows.append(("steps lost", "steps_lost", result["steps_lost"], str(result["steps_lost"])))
    for name in ("wall", "steps", "startup", "recovery", "other"):
        if isinstance(value := seconds.get(name), int | float):
            label = {"steps": "in steps", "startup": "start-up"}.get(name, name)
            rows.append((label, f"seconds.{name}", value, f"{value:.2f} s"))
    return rows


def _timeline(recovery: Mapping[str, Any]) -> str:
    rows = {rank: pieces for rank, pieces in (recovery.get("timeline") or {}).items() if pieces}
    return charts.timeline(dict(list(rows.items())[:_MOST_ROWS]), recovery["seconds"])


def _loss(result: Mapping[str, Any]) -> str:
    series = {"own": _points(result["losses"])}
    if (undisturbed := result["undisturbed"]) is not None:
        # a report with equal losses in both runs contains the losses only once
        losses = result["losses"] if result["loss_equal"] else undisturbed.get("losses") or {}
        series = {"undisturbed": _points(losses), **series}
    marks: dict[float, str] = {}
    for fault in result.get("faults") or []:
        text = f"rank {fault['rank']}, step {fault['step']}: {fault['cause']}"
        marks[fault["step"]] = f"{marks[fault['step']]}\n{text}" if fault["step"] in marks else text
    return charts.lines(series, "step", "loss", marks, from_zero=False)


def _points(losses: Mapping[str, float | None]) -> list[tuple[float, float]]:
    return [(float(step), float("nan") if loss is None else float(loss)) for step, loss in losses.items()]


def _ages(tiers: list[Mapping[str, Any]]) -> str:
    """Return a chart that shows how many steps the newest copy in each tier was behind, for at most six tiers."""
    series = {
        f"tier-{index % 6}": [(float(t), float(behind)) for t, behind in tier["behind"]]
        for index, tier in enumerate(tiers[:6])
    }
    return charts.lines(
        {name: points for name, points in series.items() if points}, "seconds", "steps behind", {}, height=180
    )
