"""Draws the plot of `hp-ext plan --plot`: the cost of each tier by its interval, and the losses of variants of the job
that lack a feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperpod_ext.planner.estimate import GoodputEstimate
    from hyperpod_ext.planner.recovery_tiers import Scenario

_POINTS = 200


def draw(file: str, scenario: Scenario, estimates: Mapping[str, GoodputEstimate]) -> None:
    """Write the plot to `file`. The format is SVG or PNG, by the suffix of the file's name.

    Raises:
        NotFoundError: matplotlib is not installed.
        ConfigError: the name of `file` ends in neither .svg nor .png.
    """
    from hyperpod_ext.errors import ConfigError, NotFoundError, Problem

    if not file.endswith((".svg", ".png")):
        raise ConfigError(
            [
                Problem(
                    f"a plot cannot be written to `{file}`",
                    source="--plot",
                    hint="name a file that ends in .svg or .png",
                )
            ]
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        hint = "run `pip install matplotlib`, or omit --plot"
        raise NotFoundError("matplotlib, which draws plots, is not installed", hint=hint) from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for tier in estimates["as planned"].tiers:
        if tier.every_steps is None:
            continue
        intervals = [tier.interval_s * 100 ** (2 * i / _POINTS - 1) for i in range(_POINTS + 1)]
        lost = [100 * (1 - tier.level.goodput(interval)) for interval in intervals]
        (line,) = left.plot(intervals, lost, label=f"{tier.kind}: every {tier.every_steps:,} steps")
        chosen = 100 * (1 - tier.level.goodput(tier.interval_s))
        left.plot([tier.interval_s], [chosen], "o", color=line.get_color())
    left.set(xscale="log", yscale="log", xlabel="seconds between saves", ylabel="% of time lost to this tier")
    if left.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower left", ncols=3, frameon=False)
    names = list(estimates)[::-1]
    shares = [100 * (1 - estimates[name].goodput) for name in names]
    bars = right.barh(names, shares)
    right.bar_label(bars, labels=[f"{value:.3g} %" for value in shares], padding=3)
    right.margins(x=0.25)  # leave room for the labels of the bars
    right.set(xlabel=f"% of time lost on {scenario.spread.nodes:,} nodes")
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)
