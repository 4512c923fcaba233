"""The plot of the checkpoint benchmark: a panel a figure, a dot a system, its spread a line, on a scale of ratios."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from publish import save_plot

from checkpoint.report import FIGURES
from checkpoint.systems import OURS, SYSTEMS

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans"})

PANELS = {
    "blocked": "Blocked by a save",
    "blocked_sharded": "Blocked, DTensors on 2 ranks",
    "lost": "Training time lost",
    "survives": "Until it survives kill -9",
    "restore": "Restore, fresh process",
    "memory": "More memory, % of the state",
}
"""Figures that are drawn; where nothing is said, in copies of the state."""
_COLORS = {True: "#274060", False: "#c8553d"}
_LEAST = 0.02
"""What is less is drawn here: the scale has no zero."""


def draw(medians: Mapping[str, Mapping[str, Mapping[str, float]]], file: Path) -> None:
    """Write `file`, whose suffix says the format."""
    from matplotlib import pyplot as plt

    names = [name for name in SYSTEMS if any(name in medians[panel] for panel in PANELS)]
    figure, panels = plt.subplots(2, 3, figsize=(11.0, 1.4 + 0.52 * max(4, len(names))), sharey=True, facecolor="white")
    for panel, axes in zip(PANELS, panels.flat, strict=True):
        _panel(axes, panel, names, medians[panel])
    figure.suptitle("In copies of the state (memcpy); dashed: what is wanted of ours", x=0.01, ha="left", fontsize=10)
    figure.tight_layout(h_pad=2.0, w_pad=1.5)
    save_plot(figure, file)


def _panel(axes: Any, panel: str, names: list[str], found: Mapping[str, Mapping[str, float]]) -> None:
    wanted = FIGURES[panel]
    for row, name in enumerate(names):
        each = found.get(name)
        if not each:
            axes.text(0.02, row, "-", transform=axes.get_yaxis_transform(), va="center", color="#808080")
            continue
        middle, color = max(each["median"], _LEAST), _COLORS[name == OURS]
        axes.plot([max(each["min"], _LEAST), max(each["max"], _LEAST)], [row, row], color=color, lw=1.6, alpha=0.5)
        axes.plot([middle], [row], "o", color=color, ms=5)
        axes.annotate(
            f"{each['median']:.3g}", (middle, row), (0, 5), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter("")
    if wanted.target:
        axes.axvline(wanted.target, color="#5b8e7d", lw=1.2, ls="--")
    axes.set_yticks(range(len(names)), [SYSTEMS[name].label for name in names])
    axes.set_ylim(len(names) - 0.4, -0.7)
    axes.set_title(PANELS[panel], loc="left", fontsize=10)
    axes.tick_params(length=0, which="both")
    axes.grid(True, axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
