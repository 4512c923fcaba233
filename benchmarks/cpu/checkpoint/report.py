"""From rows to figures: medians over rounds of ratios within a round, and whether ours meet their targets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from checkpoint.systems import MEMCPY, OURS, SYSTEMS, Has

Row = Mapping[str, Any]
SAVES = "saves"
_CAMPAIGNS = {
    "first_blocked": "firsts",
    "lost": "training",
    "every_step": "training",
    "replicate": "replicas",
    "replicate_both": "replicas",
    "peer_restore": "replicas",
    "drain": "drain",
}
"""Campaign of each kind of row that `saves` does not measure."""


@dataclass(frozen=True)
class Figure:
    """One column: which rows it is made of, and what is wanted of ours."""

    label: str
    what: str
    key: str
    kind: str = "plain"
    has: Has | None = None
    """What a system must have for it to have this figure."""
    target: float | None = None
    least: bool = False
    """Whether the target is a least, not a most."""
    unit: str = "x"

    @property
    def campaign(self) -> str:
        """The campaign that measures it."""
        return _CAMPAIGNS.get(self.what, SAVES)

    def met(self, value: float) -> bool:
        assert self.target is not None
        return value >= self.target if self.least else value <= self.target


FIGURES = {
    "blocked": Figure("blocked by a save", "blocked", "ratio", target=1.10),
    "blocked_sharded": Figure("blocked by a save, DTensors on 2 ranks", "blocked", "ratio", "sharded", target=1.10),
    "first": Figure("blocked by the first save", "first_blocked", "ratio", target=1.2),
    "first_sharded": Figure(
        "blocked by the first save, DTensors on 2 ranks", "first_blocked", "ratio", "sharded", target=1.2
    ),
    "blocked_overlapped": Figure("blocked, staged during a step", "lost", "blocked_ratio", has="overlapped"),
    "lost": Figure("training time lost by a save", "lost", "ratio", target=0.12),
    "every_step": Figure("step with a save / without", "every_step", "ratio", target=1.10),
    "survives": Figure("time until a save survives kill -9", "survives", "ratio", has="survives", target=1.5),
    "memory": Figure("more memory in the trainer", "memory", "own", target=5.0, unit="%"),
    "helpers": Figure("more memory in processes that the trainer started", "memory", "helpers", unit="%"),
    "restore": Figure("restore in a new process", "restore", "ratio", has="restores", target=1.2),
    "replica_blocked": Figure("copy on a peer: blocked by the save", "replicate", "blocked_ratio", has="replicates"),
    "replica_lost": Figure("copy on a peer: training time lost", "replicate", "lost_ratio", has="replicates"),
    "replica_done": Figure(
        "copy on a peer: time until complete", "replicate", "done_ratio", has="replicates", target=10.0
    ),
    "peer_restore": Figure(
        "restore from a peer / plain sockets", "peer_restore", "ratio", has="peer_restore", target=1.5
    ),
}
PEER_FIGURES = {
    "replica_more": Figure("additional blocked time", "replicate", "more_blocked_ratio", target=0.05),
    "replica_more_lost": Figure("additional training time lost", "replicate", "more_lost_ratio", target=0.7),
    "replica_since": Figure("time until complete, from the call of the save", "replicate", "since_save_ratio"),
    "plain_lost": Figure("plain copy: training time lost", "replicate", "plain_lost_ratio"),
    "plain_done": Figure("plain copy: time until complete", "replicate", "plain_done_ratio"),
    "nice_lost": Figure("low-priority plain copy: training time lost", "replicate", "nice_lost_ratio"),
    "nice_done": Figure("low-priority plain copy: time until complete", "replicate", "nice_done_ratio"),
    "of_nice": Figure("ours / low-priority plain copy: time until complete", "replicate", "of_nice"),
    "cpu_of_nice": Figure("ours / low-priority plain copy: CPU time", "replicate", "cpu_of_nice"),
    "both_lost": Figure("both ways: training time lost", "replicate_both", "lost_ratio"),
    "both_done": Figure("both ways: time until complete", "replicate_both", "done_ratio"),
    "both_plain_lost": Figure("both ways, two plain copies: training time lost", "replicate_both", "plain_lost_ratio"),
    "both_plain_done": Figure("both ways, two plain copies: time until complete", "replicate_both", "plain_done_ratio"),
    "both_nice_lost": Figure(
        "both ways, two low-priority plain copies: training time lost", "replicate_both", "nice_lost_ratio"
    ),
    "both_nice_done": Figure(
        "both ways, two low-priority plain copies: time until complete", "replicate_both", "nice_done_ratio"
    ),
}
"""Of ours alone: what a copy on a peer adds to a save, and what plain sockets need beside the same trainer."""
DRAIN_FIGURES = {
    "drain_gb_per_s": Figure("GB/s", "drain", "gb_per_s", unit=""),
    "drain_speed": Figure("speed / fastest other client", "drain", "speed_ratio", target=0.8, least=True),
    "drain_cpu_s_per_gb": Figure("CPU seconds of the client per GB", "drain", "cpu_s_per_gb", unit=""),
    "drain_cpu": Figure("CPU time / upload_fileobj", "drain", "cpu_ratio", target=0.25),
    "drain_step": Figure("step during the upload / without", "drain", "step_ratio", target=1.15),
}
ALL_FIGURES = FIGURES | PEER_FIGURES | DRAIN_FIGURES


@dataclass(frozen=True)
class Steadiness:
    """What is wanted of a figure of ours besides its median."""

    label: str
    figure: str
    target: float
    of: Literal["median", "memcpy"]
    """What is held against what: the worst round against the median, or the median against that of memcpy."""

    def measured(self, found: Mapping[str, Mapping[str, float]]) -> float | None:
        """None: nothing was measured, or it costs nothing, so there is no ratio."""
        value, of = found.get(OURS, {}), found.get(OURS if self.of == "median" else MEMCPY, {})
        if not value or of.get("median", 0.0) <= 0.0:
            return None
        return value["max" if self.of == "median" else "median"] / of["median"]


_WORST = "worst round / median"
STEADINESS = {
    "lost_of_memcpy": Steadiness("training time lost by a save / lost by memcpy", "lost", 1.1, "memcpy"),
    "lost_worst": Steadiness(f"training time lost by a save: {_WORST}", "lost", 1.5, "median"),
    "first_worst": Steadiness(f"blocked by the first save: {_WORST}", "first", 1.5, "median"),
    "first_sharded_worst": Steadiness(
        f"blocked by the first save, DTensors on 2 ranks: {_WORST}", "first_sharded", 1.5, "median"
    ),
    "restore_worst": Steadiness(f"restore in a new process: {_WORST}", "restore", 1.5, "median"),
}
"""Of ours alone: whether a round may be as the median says."""

UPLOAD_FILEOBJ = "boto3 upload_fileobj"


def with_drain_ratios(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows; those of drains with their ratios to the fastest client and to upload_fileobj of the same round."""
    found = [dict(row) for row in rows]
    rounds: dict[int, list[dict[str, Any]]] = {}
    for row in found:
        if row["what"] == "drain":
            rounds.setdefault(row["round"], []).append(row)
    for drains in rounds.values():
        fastest = max((row["gb_per_s"] for row in drains if row["system"] != OURS), default=None)
        costs = [row["cpu_s"] for row in drains if row["system"] == UPLOAD_FILEOBJ]
        for row in drains:
            if fastest:
                row["speed_ratio"] = row["gb_per_s"] / fastest
            if costs and costs[0]:
                row["cpu_ratio"] = row["cpu_s"] / costs[0]
    return found


def summarize(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """n, median, least and most of each figure of each system."""
    values: dict[str, dict[str, list[float]]] = {name: {} for name in ALL_FIGURES}
    for row in with_drain_ratios(rows):
        for name, figure in ALL_FIGURES.items():
            if (row["what"], row["kind"]) == (figure.what, figure.kind) and figure.key in row:
                values[name].setdefault(row["system"], []).append(float(row[figure.key]))
    return {name: {system: _spread(each) for system, each in found.items()} for name, found in values.items()}


def _spread(values: Sequence[float]) -> dict[str, float]:
    figures = {"median": median(values), "min": min(values), "max": max(values)}
    return {"n": len(values), **{name: float(f"{value:.4g}") for name, value in figures.items()}}


def survived(rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """Of each system: how many saves were there after the kill, of how many that it had called safe."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row["what"] == "survives":
            good, of = found.get(row["system"], (0, 0))
            found[row["system"]] = (good + bool(row["survived"]), of + 1)
    return found


def judge(summary: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Each target with what was measured of ours; `met` is None where nothing was."""
    verdicts = []
    for name, figure in ALL_FIGURES.items():
        if figure.target is not None:
            found = summary[name].get(OURS)
            met = figure.met(found["median"]) if found else None
            verdicts.append({"figure": name, "target": figure.target, "least": figure.least, "met": met, "ours": found})
    for name, wanted in STEADINESS.items():
        measured = wanted.measured(summary[wanted.figure])
        verdict = {"figure": name, "target": wanted.target, "least": False, "measured": measured}
        met = None if measured is None else measured <= wanted.target
        verdicts.append(verdict | {"met": met, "ours": summary[wanted.figure].get(OURS)})
    return verdicts


def has_none(system: str, figure: Figure) -> bool:
    return figure.has is not None and figure.has not in SYSTEMS[system].has
