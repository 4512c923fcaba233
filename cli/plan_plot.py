"""The plan as a picture: goodput by interval of each tier, and what is left without each feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperpod_ext.planner.outlook import Outlook
    from hyperpod_ext.planner.ways import Way

_POINTS = 200


def draw(file: str, way: Way, outlooks: Mapping[str, Outlook]) -> None:
    """Write the picture to `file`, .svg or .png by its name.

    Raises:
        NotFoundError: matplotlib is not installed.
        ConfigError: another kind of file.
    """
    from hyperpod_ext.errors import ConfigError, NotFoundError, Problem

    if not file.endswith((".svg", ".png")):
        raise ConfigError([Problem(f"cannot draw to `{file}`", source="--plot", hint="name a .svg or a .png")])
    try:
        from matplotlib.figure import Figure
    except ImportError:
        hint = "pip install matplotlib, or leave --plot out"
        raise NotFoundError("matplotlib, which draws plots, is not installed", hint=hint) from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for tier in outlooks["as planned"].tiers:
        if tier.every_steps is None:
            continue
        intervals = [tier.interval_s * 100 ** (2 * i / _POINTS - 1) for i in range(_POINTS + 1)]
        lost = [100 * (1 - tier.level.goodput(interval)) for interval in intervals]
        (line,) = left.plot(intervals, lost, label=f"{tier.kind}: every {tier.every_steps:,} steps")
        chosen = 100 * (1 - tier.level.goodput(tier.interval_s))
        left.plot([tier.interval_s], [chosen], "o", color=line.get_color())
    left.set(xscale="log", yscale="log", xlabel="seconds between saves", ylabel="% of time lost to this tier")
    if left.get_legend_handles_labels()[0]:
        left.legend()
    names = list(outlooks)
    kept = [100 * one.goodput for one in outlooks.values()]
    bars = right.barh(names[::-1], kept[::-1])
    right.bar_label(bars, labels=[f"{value:.2f} %" for value in kept[::-1]], padding=3)
    right.set(xlim=(0, 118), xlabel=f"goodput on {way.spread.nodes:,} nodes, %")
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)
