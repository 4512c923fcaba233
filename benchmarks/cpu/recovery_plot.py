"""The plot of the recovery benchmark: all sides to one scale, and ours enlarged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import ConnectionPatch
from publish import save_plot
from recovery_report import OURS

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans"})

COLORS = {
    "notice and stop": "#808080",
    "a new process": "#b9822b",
    "imports": "#c8553d",
    "process groups": "#5b8e7d",
    "build the model": "#8e6c8a",
    "state back": "#3d7ea6",
    "first new step": "#274060",
    "back past the killed step": "#7f8ea3",
    "goes on without the dead rank": "#c9c9c9",
}
KIND = {
    "fault_seen": "notice and stop",
    "survivors_freed": "notice and stop",
    "survivor_exception": "notice and stop",
    "new_member": "a new process",
    "discarded": "notice and stop",
    "python_started": "a new process",
    "called": "notice and stop",
    "imported": "imports",
    "groups_back": "process groups",
    "group_up": "process groups",
    "built": "build the model",
    "state_back": "state back",
    "loaded": "state back",
    "first_new_step": "first new step",
    "back_past": "back past the killed step",
    "all_ranks": "goes on without the dead rank",
}


def draw(medians: Mapping[str, Any], file: Path) -> None:
    """Write `file`, whose suffix says the format."""
    from matplotlib import pyplot as plt

    sides = list(medians)[::-1]
    size = (9.0, 3.4 + 0.6 * len(sides))
    figure, (both, close) = plt.subplots(2, 1, figsize=size, height_ratios=[len(sides), 1.25], facecolor="white")
    totals = {side: sum(seconds or 0.0 for seconds in medians[side]["phases"].values()) for side in sides}
    for row, side in enumerate(sides):
        end = _bar(both, row, medians[side]["phases"], least_label=0.045 * max(totals.values()))
        both.text(end + 0.012 * max(totals.values()), row, f"{end:.2f} s", va="center", fontweight="bold")
    both.set_yticks(range(len(sides)), sides)
    both.xaxis.tick_top()  # the lines to the enlarged bar go below
    both.set_xlim(0, max(totals.values()) * 1.1)
    both.set_title("From kill -9 until all ranks are back past the killed step, in seconds", loc="left", pad=10)

    end = _bar(close, 0, medians[OURS]["phases"], least_label=0.045 * totals[OURS])
    close.set_yticks([0], [f"{OURS},\nenlarged"])
    close.set_xlim(0, end * 1.1)
    for axes in (both, close):
        _clean(axes)
    for x in (0.0, end):
        figure.add_artist(
            ConnectionPatch(
                (x, len(sides) - 0.67), (x, -0.35), both.transData, close.transData, color="#b0b0b0", lw=0.8, ls=":"
            )
        )
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, list(COLORS), ncols=3, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1), h_pad=2.0)
    save_plot(figure, file)


def _bar(axes: Axes, row: int, phases: Mapping[str, float | None], least_label: float) -> float:
    """One stacked bar, by kind of phase; returns where it ends."""
    kinds: dict[str, float] = {}
    whole = "all_ranks" not in phases
    for name, seconds in phases.items():
        # what the others do not wait for is no part of their time
        kind = KIND[name] if whole or name in ("discarded", "first_new_step") else KIND["all_ranks"]
        kinds[kind] = kinds.get(kind, 0.0) + (seconds or 0.0)
    left = 0.0
    for kind, seconds in kinds.items():
        axes.barh(row, seconds, left=left, height=0.62, color=COLORS[kind], edgecolor="white", linewidth=0.6)
        if seconds >= least_label:
            axes.text(left + seconds / 2, row, f"{seconds:.2f}", ha="center", va="center", color="white", fontsize=9)
        left += seconds
    return left


def _clean(axes: Axes) -> None:
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.xaxis.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
