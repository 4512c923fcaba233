"""Writes the report of a job as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hyperpod_ext.planner.advice_model import phase_name

from . import charts
from .units import axis_unit, duration

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
_OWN_TIME = ("data", "checkpoint", "restore")
"""Phases in which a rank does not wait for other ranks, so that their sum shows which rank is slow."""
_ALL_SHOWN_UP_TO = 8
"""If a job has more ranks or copies than this number, the page shows only some of them, because more rows would look
alike."""
_MOST_TIMELINES = 40


def make_page(result: Mapping[str, Any]) -> str:
    """Return the HTML page for a job's result, which includes `advice`.

    Figures are `<data>` elements. `data-key` is the name of the field in the JSON report, and `value` is its value.
    """
    from hyperpod_ext.jobs.contract.render import render

    over_time = result.get("over_time") or {"part_s": 0.0, "shares": {}}
    from_s = (result["seconds"].get("startup") or 0.0) if result["steps"] else 0.0
    phases, shares, tiers = result.get("phases") or {}, over_time["shares"], result.get("tiers") or []
    seen = {phase for of_rank in phases.values() for phase, seconds in of_rank.items() if seconds}
    order = [*(phase for phase in _ORDER if phase in seen), *sorted(seen - set(_ORDER))]
    in_chart = [phase for phase in order if phase in shares and (phase != "startup" or not from_s)]
    shown = result["recoveries"][:_MOST_TIMELINES]
    return render(
        "report/page.html.j2",
        result=result,
        nothing=NOTHING_TO_CHANGE,
        name_of=phase_name,
        duration=duration,
        compared=_compared(result),
        figures=_figures(result),
        over_time=charts.stacked(
            {phase: shares[phase] for phase in in_chart},
            over_time["part_s"],
            from_s,
        )
        if shares
        else "",
        from_s=from_s,
        phases=order,
        ranks=_slow_first({rank: sum(of_rank.get(p, 0.0) for p in _OWN_TIME) for rank, of_rank in phases.items()}),
        own_time=[phase_name(phase) for phase in _OWN_TIME],
        seconds=phases,
        spread=_spread(phases),
        recoveries=[{**recovery, **_timeline(recovery)} for recovery in shown],
        in_recoveries=[phase for phase in order if phase in _in_timelines(shown)],
        in_chart=in_chart,
        more_recoveries=len(result["recoveries"]) - len(shown),
        loss=_loss(result),
        tiers=(furthest := _furthest_behind(tiers)),
        more_tiers=len(tiers) - len(furthest),
        ages=_ages(furthest, from_s),
        traffic=result.get("traffic") or {},
    )


def _compared(result: Mapping[str, Any]) -> list[tuple[bool | None, str]]:
    """Return whether losses and weights equal those of the run without faults, as texts. None: not compared."""
    texts = {True: "equal to", False: "DIFFERENT from", None: "not compared with"}
    return [
        (equal, f"{name} {texts[equal]} the run without faults")
        for name, equal in (("weights", result.get("weights_equal")), ("loss", result["loss_equal"]))
    ]


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str, Any, str]]:
    """Return the figures for the head of the page, each with label, key, value and text."""
    seconds = result["seconds"]
    rows: list[tuple[str, str, Any, str]] = []
    rows.append(("goodput", "goodput", result["goodput"], f"{100 * result['goodput']:.1f} %"))
    if undisturbed := result["undisturbed"]:
        goodput = undisturbed["goodput"]
        rows.append(("the run without faults", "undisturbed.goodput", goodput, f"{100 * goodput:.1f} %"))
    rows.append(("steps", "steps", result["steps"], str(result["steps"])))
    for name in ("wall", "steps", "startup", "recovery", "other"):
        if isinstance(value := seconds.get(name), int | float):
            label = "in steps" if name == "steps" else phase_name(name)
            rows.append((label, f"seconds.{name}", value, duration(value)))
    return rows


def _timeline(recovery: Mapping[str, Any]) -> dict[str, str]:
    """Return the chart of a recovery, and a sentence about the ranks that did not fail."""
    rows = {rank: pieces for rank, pieces in (recovery.get("timeline") or {}).items() if pieces}
    failed = [str(rank) for rank in recovery.get("failed") or [recovery["fault"]["rank"]]]
    restored = {rank: _restored(pieces, recovery["seconds"]) for rank, pieces in rows.items()}
    shown = _slow_first(restored, failed)
    chart = charts.timeline({name: rows[rank] for rank, name in shown.items()}, recovery["seconds"])
    others = sorted(moment for rank, moment in restored.items() if rank not in failed)
    if len(others) < 2:
        return {"chart": chart, "spread": ""}
    fastest, median, slowest = (duration(others[at]) for at in (0, len(others) // 2, -1))
    text = f"{len(others)} other ranks had restored their state after {fastest} to {slowest}, median {median}."
    return {"chart": chart, "spread": text}


def _restored(pieces: Sequence[tuple[str, float, float]], otherwise: float) -> float:
    """Return the seconds from the fault until a rank had restored its state. Later phases do not count, because the
    rank then waits for other ranks."""
    return max((began + took for phase, began, took in pieces if phase == "restore"), default=otherwise)


def _in_timelines(recoveries: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the phases in the timelines of recoveries."""
    lanes = [pieces for recovery in recoveries for pieces in (recovery.get("timeline") or {}).values()]
    return {phase for pieces in lanes for phase, _, _ in pieces}


def _slow_first(seconds: Mapping[str, float], failed: Collection[str] = ()) -> dict[str, str]:
    """Return the ranks to show, each with its label: failed ranks, then the other ranks, slowest first. Of many ranks,
    only the slowest, the median and the fastest are shown."""
    first = {rank: f"rank {rank}, failed" for rank in failed if rank in seconds}
    others = sorted(seconds.keys() - first.keys(), key=lambda rank: (-seconds[rank], len(rank), rank))
    if len(others) < 2:
        return first | {rank: f"rank {rank}" for rank in others}
    named = {0: "slowest", len(others) - 1: "fastest"}
    if len(seconds) > _ALL_SHOWN_UP_TO:
        named = {0: "slowest", len(others) // 2: "median", len(others) - 1: "fastest"}
        return first | {others[at]: f"rank {others[at]}, {name}" for at, name in named.items()}
    return first | {rank: ", ".join(filter(None, (f"rank {rank}", named.get(at)))) for at, rank in enumerate(others)}


def _spread(phases: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return the difference between the ranks with the most and the least time in each phase, as text."""
    columns: dict[str, list[float]] = {}
    for of_rank in phases.values():
        for phase, seconds in of_rank.items():
            columns.setdefault(phase, []).append(seconds)
    return {phase: duration(max(column) - min(column)) for phase, column in columns.items()}


def _furthest_behind(tiers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the copies to show: for a large job, the two copies of each tier that failed most often, or else that are
    furthest behind; for a small job, all copies."""
    if len(tiers) <= _ALL_SHOWN_UP_TO:
        return [*tiers]
    worst: dict[str, list[Mapping[str, Any]]] = {}
    for tier in sorted(tiers, key=lambda tier: (-tier["failed"], tier["newest_step"] or 0, tier["node"])):
        worst.setdefault(tier["tier"], []).append(tier)
    return [tier for its in worst.values() for tier in its[:2]]


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


def _ages(tiers: Sequence[Mapping[str, Any]], from_s: float) -> str:
    """Return a chart that shows how many steps the newest copy in each tier was behind, for at most six tiers.

    `from_s`: seconds from the start of the job to its first step, where the time axis begins."""
    latest = max((t for tier in tiers for t, _ in tier["behind"]), default=0.0)
    unit, unit_s = axis_unit(latest - from_s)
    series = {
        f"tier-{index % 6}": [((t - from_s) / unit_s, float(behind)) for t, behind in tier["behind"] if t >= from_s]
        for index, tier in enumerate(tiers[:6])
    }
    x_label = f"{unit} since the first step"
    return charts.lines(
        {name: points for name, points in series.items() if points}, x_label, "steps behind", {}, height=240
    )
