"""The command `hp-ext simulate`."""

from __future__ import annotations

from typing import Any

import click

from ..command import Command, output_option
from ..output import columns, print_result, say
from .options import planning_options

_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t distribution for 1 to 15 degrees of freedom. For more degrees of freedom, 2.1 is
used."""


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext simulate --model llama3-70b --nodes 64 --step-seconds 8
  hp-ext simulate -f job.yaml --params 8B --runs 30 --seed 7 -o json
  hp-ext simulate --model llama3.1-405b --nodes 16384 --spares 320 --runs 1""",
)
@planning_options
@click.option("--runs", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Number of simulated jobs.")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the random failures. The same seed draws the same failures.",
)
@click.option("--best", is_flag=True, help="Use the planner's intervals instead of the spec's.")
@click.option(
    "--whole",
    "every_rank",
    is_flag=True,
    help="Simulate every rank in every decision. Slower, with the same results.",
)
@output_option()
def command(
    runs: int,
    seed: int,
    best: bool,
    every_rank: bool,
    output: str,
    **options: Any,
) -> None:
    """Simulate a job with random failures. The simulation uses the code that makes decisions in real jobs."""
    from hyperpod_ext.planner.estimate import look_ahead
    from hyperpod_ext.runtime.simulator.engine import Simulation
    from hyperpod_ext.runtime.simulator.settings import simulated

    from .planning import read_question

    question = read_question(options)
    scenario = question.scenario
    every = None if best else question.written
    estimate = look_ahead(scenario, every)
    settings = simulated(scenario, estimate.every())
    outcomes = [Simulation(settings, seed + run, every_rank=every_rank).run(options["days"]) for run in range(runs)]
    kept = [outcome.goodput for outcome in outcomes]
    mean, margin = _mean(kept)
    result = {
        "nodes": scenario.spread.nodes,
        "spares": settings.spares,
        "days": options["days"],
        "runs": runs,
        "seed": seed,
        "every_steps": estimate.every(),
        "goodput": {"mean": round(mean, 6), "margin_95": None if margin is None else round(margin, 6)},
        "planner": round(estimate.goodput, 6),
        "each": [outcome.to_json() for outcome in outcomes],
        "notes": list(question.notes),
        "warnings": list(question.warnings),
    }
    for warning in question.warnings:
        say(f"warning: {warning}")
    print_result(result, output, _describe(result))


def _mean(values: list[float]) -> tuple[float, float | None]:
    """Return the mean of `values`, and half the width of its 95 % confidence interval; None for a single value."""
    import statistics

    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    quantile = _QUANTILES[len(values) - 2] if len(values) - 2 < len(_QUANTILES) else 2.1
    return mean, quantile * statistics.stdev(values) / len(values) ** 0.5


def _amount(gb: float) -> str:
    """Return a number of gigabytes as text in a readable unit, such as `1.5 TB`."""
    for unit in ("GB", "TB"):
        if gb < 1000:
            return f"{gb:,.1f} {unit}"
        gb /= 1000
    return f"{gb:,.1f} PB"


def _describe(result: dict[str, Any]) -> str:
    each, goodput = result["each"], result["goodput"]

    def total(*path: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for outcome in each:
            for name, value in outcome[path[0]].items():
                sums[name] = sums.get(name, 0) + value
        return {name: value / len(each) for name, value in sums.items()}

    def listed(values: dict[str, float]) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value:,.1f}" for name, value in values.items()) or "-"

    margin = f" +- {100 * goodput['margin_95']:.3f}" if goodput["margin_95"] is not None else ""
    wall = result["days"] * 86400
    shares = {name: 100 * value / wall for name, value in total("seconds").items() if name != "wall"}
    rows = [
        (
            "simulated",
            f"{result['runs']} x {result['days']:g} days of {result['nodes']:,} nodes, {result['spares']} spares",
        ),
        (
            "saves",
            ", ".join(f"{kind} every {steps:,} steps" for kind, steps in result["every_steps"].items()) or "none",
        ),
        ("goodput", f"{100 * goodput['mean']:.3f}{margin} %; the planner expects {100 * result['planner']:.3f} %"),
        ("time", ", ".join(f"{name.replace('_', ' ')} {share:.2f} %" for name, share in shares.items())),
        ("failures a run", listed(total("faults"))),
        ("restored from", listed(total("fell_back_to"))),
        ("steps lost", f"{sum(outcome['lost_steps'] for outcome in each) / len(each):,.1f}"),
        ("started again", f"{sum(outcome['relaunches'] for outcome in each) / len(each):,.1f}"),
        ("traffic", ", ".join(f"{_amount(gb)} {name.replace('_', ' ')}" for name, gb in total("traffic_gb").items())),
    ]
    given_up = [why for outcome in each for why in outcome["given_up"]][:1]
    lines = [
        columns(rows),
        *(f"the job gave up: {why}" for why in given_up),
        *(f"- {note}" for note in result["notes"]),
    ]
    return "\n".join(lines)
