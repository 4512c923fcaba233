"""Seconds from a fault until training goes on, by the number of GPUs: ours measured, ours simulated, and published.

`python benchmarks/cpu/recovery_by_nodes.py` measures nothing: it reads the other benchmarks' figures in
docs/benchmarks, runs `hp-ext simulate`'s engine, and writes recovery-by-nodes.md, .json and .svg there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from publish import RESULTS, publish, save_plot

from hyperpod_ext.planner import control_plane
from hyperpod_ext.planner.costs import Spread
from hyperpod_ext.planner.estimate import look_ahead
from hyperpod_ext.planner.presets import preset
from hyperpod_ext.planner.rates import published
from hyperpod_ext.planner.recovery_tiers import Recovery, Scenario
from hyperpod_ext.planner.state import FORMATS, size_of
from hyperpod_ext.runtime.simulator.engine import Simulation
from hyperpod_ext.runtime.simulator.settings import simulated

matplotlib.use("Agg")
matplotlib.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans"})

WORKERS = 8
NODES = (16, 64, 256, 1024, 2048, 4096, 16384)
MODEL = "llama3-70b"
_BELOW = ("TrainMover", "FlashRecovery")
"""Whose names go there in the plot."""
_FAULTS = 300
"""That each simulated job is to meet, about."""


class Point(NamedTuple):
    gpus: int
    seconds: float
    what: str
    source: str


PUBLISHED = (
    Point(16, 50, "AWS checkpointless", "AWS's blog, December 2025: 5:10 before, 0:50 after"),
    Point(256, 47, "AWS checkpointless", "the same: 4:52 before, 0:47 after"),
    Point(2304, 120, "AWS checkpointless", "the same: 15 to 30 min before, less than 2 min after"),
    Point(1024, 20, "TrainMover", "arXiv 2412.12636v3: about 20 s of downtime, with standby machines"),
    Point(4800, 150, "FlashRecovery", "arXiv 2509.03047: 150 s on 4,800 NPUs"),
    Point(100_000, 180, "FT-HSDP", "arXiv 2602.00277: 3 min of stall, 10 min before"),
)


def simulate(nodes: int) -> float:
    """Mean seconds of a fault, reading the state included."""
    nbytes = size_of(preset(MODEL), FORMATS["mixed"]).nbytes
    rates = published("llama3-405b").of_job(nodes)
    scenario = Scenario(
        Spread(nbytes, nodes, WORKERS, nodes * WORKERS),
        10.0,
        rates,
        frozenset({"memory", "peer", "durable"}),
        recovery=Recovery.at(nodes),
    )
    settings = simulated(scenario, look_ahead(scenario).every(), spares=8 + nodes // 50)
    outcome = Simulation(settings, 0).run(_FAULTS / rates.total / 86400)
    return outcome.recovery_s / sum(outcome.faults.values())


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def figures() -> dict[str, list[tuple[int, float]]]:
    """Of ours, by the line of the plot: GPUs, or ranks, and seconds."""
    recovery, rendezvous = read("recovery"), read("rendezvous")["medians"]["hyperpod_ext"]
    ranks = recovery["job"]["ranks"]
    return {
        "kill -9 to the first new step, less one step": [
            (ranks, recovery["medians"]["hyperpod_ext"]["first_new_step_less_a_step"])
        ],
        "process groups opened again, all on 2 cores": [
            (int(size), row["reinit_and_sum"]) for size, row in rendezvous.items()
        ],
        "control plane: a lost node, CPU of the coordinator": [
            (row["ranks"], row["fault_cpu_s"]) for row in read("control-plane")["rows"]
        ],
        "simulated, 5 s and 30 s assumed for scripts and devices": [
            (nodes * WORKERS, round(simulate(nodes), 2)) for nodes in NODES
        ],
    }


def draw(ours: dict[str, list[tuple[int, float]]], file: Path) -> None:
    """Write `file`."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9.0, 5.2), facecolor="white")
    looks = (("D", "#c8553d"), ("s", "#5b8e7d"), ("o", "#3d7ea6"), ("^", "#274060"))
    for (name, points), (marker, color) in zip(ours.items(), looks, strict=True):
        line = "--" if name.startswith("simulated") else "-"
        axes.plot(*zip(*points, strict=True), marker=marker, color=color, ls=line, label=f"ours, {name}")
    axes.plot(
        [point.gpus for point in PUBLISHED],
        [point.seconds for point in PUBLISHED],
        "x",
        color="#808080",
        ms=8,
        label="published by others, of their own machines and jobs",
    )
    for point in PUBLISHED:
        axes.annotate(
            point.what,
            (point.gpus, point.seconds),
            xytext=(6, -12 if point.what in _BELOW else 5),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(xscale="log", yscale="log", xlabel="ranks, or GPUs", ylabel="seconds", xlim=(2.5, 500_000))
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="lower center", ncols=1, frameon=False)
    figure.tight_layout(rect=(0, 0.22, 1, 1))
    save_plot(figure, file)


PAGE = """# Seconds of a recovery, by the number of GPUs

`make bench-recovery-by-nodes` writes this page, [recovery-by-nodes.json](recovery-by-nodes.json) and the plot, from
the figures of the other pages.

![Seconds of a recovery by the number of GPUs](recovery-by-nodes.svg)

## Our measurements

The parts of a recovery were measured separately, on 2 cores without a GPU: [a whole recovery](recovery.md) at {ranks}
ranks, [process groups](rendezvous.md) at 4 to 64 ranks, [the control plane](control-plane.md) at 16 to 2,048 nodes of
eight ranks. The time to create process groups is the CPU time of all ranks on the same two cores. If each rank has its
own core, creating process groups takes about 3 ms per rank at each of these sizes.

The simulated seconds are means of about {faults} faults per job, with {model} sharded over all ranks, the failure rates
of the published run of Llama 3, and enough spares that hardly any fault waits for a repair. All other settings are the
defaults of `hp-ext simulate`. The time that the script and the devices need after a fault is **assumed**: 5 s for a
process and 30 s for a node, at any number of GPUs. The time of the control plane (agents and coordinator) was measured
with up to 2,048 nodes. For more than 2,048 nodes, the control plane's time is **extrapolated** in proportion to N log
N. The time to read the state is computed from assumed speeds, and is longest if few nodes each hold much of the state.
NCCL was not measured: creating NCCL's communicators again may take longer than 5 s, and takes longer with more GPUs.
Measure your own times, and pass them to `hp-ext simulate` as `--process-s` and `--node-s`.

| nodes | GPUs | seconds per fault | seconds of the control plane |
| ---: | ---: | ---: | ---: |
{rows}

## Published by others

The figures in this table are from other authors, who used other machines and models, and measured other parts of a
recovery. The figures from other authors cannot be compared with our measurements.

| | GPUs | seconds | as it was published |
| --- | ---: | ---: | --- |
{published}
"""


def main() -> None:
    ours = figures()
    *_, simulated_ones = ours.values()
    rows = "\n".join(
        f"| {gpus // WORKERS:,} | {gpus:,} | {seconds:.1f} | {control_plane.at(gpus // WORKERS).fault_s:.2f} |"
        for gpus, seconds in simulated_ones
    )
    others = "\n".join(f"| {one.what} | {one.gpus:,} | {one.seconds:g} | {one.source} |" for one in PUBLISHED)
    ranks = read("recovery")["job"]["ranks"]
    page = PAGE.format(ranks=ranks, faults=_FAULTS, model=MODEL, rows=rows, published=others)
    data = {"ours": ours, "published": [point._asdict() for point in PUBLISHED]}
    publish(RESULTS, "recovery-by-nodes", data, page)
    draw(ours, RESULTS / "recovery-by-nodes.svg")


if __name__ == "__main__":
    main()
