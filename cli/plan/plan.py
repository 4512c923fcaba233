"""The command `hp-ext plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..command import Command, output_option
from ..output import columns, count, print_result, say
from .options import planning_options

if TYPE_CHECKING:
    from hyperpod_ext.planner.estimate import GoodputEstimate

    from .planning import Question


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext plan --model llama3-70b --nodes 64 --instance-type ml.p5.48xlarge
  hp-ext plan -f job.yaml --params 8B --step-seconds 2.5 --plot plan.svg
  hp-ext plan -f job.yaml --state-gb 112 --history runs/my-job -o json""",
)
@planning_options
@click.option(
    "--plot", type=click.Path(), metavar="FILE", help="Also draw a plot into this file, .svg or .png. Needs matplotlib."
)
@output_option()
def command(plot: str | None, output: str, **options: Any) -> None:
    """Show the size of a job's state, the best interval of each tier, and the expected goodput and cost."""
    from hyperpod_ext.planner.costs import memory_per_node
    from hyperpod_ext.planner.estimate import look_ahead, without_each

    from .planning import read_question

    question = read_question(options)
    scenario, usd = question.scenario, question.usd_per_hour
    estimates = without_each(scenario)
    written = look_ahead(scenario, question.written) if question.written is not None else None
    memory = memory_per_node(scenario.spread, question.policy)
    if plot is not None:
        from .plot import draw

        draw(plot, scenario, estimates)
    result = {
        "state": {
            "what": question.describes,
            "parameters": question.size.parameters,
            "bytes": question.size.nbytes,
            "gb": round(question.size.nbytes / 1e9, 2),
            "gib": round(question.size.nbytes / 2**30, 2),
        },
        "nodes": scenario.spread.nodes,
        "workers_per_node": scenario.spread.workers_per_node,
        "step_s": scenario.step_s,
        "memory_per_node_bytes": round(memory),
        "failures_a_day": round(scenario.rates.total * 86400, 6),
        "plan": estimates["as planned"].to_json(usd),
        "as_written": written and written.to_json(usd),
        "without": {name: one.to_json(usd) for name, one in estimates.items() if name != "as planned"},
        "set": _settings(question, estimates["as planned"]) if options["file"] else [],
        "notes": [*_advice(estimates), *question.notes],
        "warnings": list(question.warnings),
    }
    for warning in question.warnings:
        say(f"warning: {warning}")
    table = _describe(question, estimates, written, memory) if output == "table" else ""
    if table and options["file"]:
        changes = " ".join(f"--set {one}" for one in _settings(question, estimates["as planned"]))
        table += f"\n- to use these intervals: {changes}"
    print_result(result, output, table)


def _settings(question: Question, estimate: GoodputEstimate) -> list[str]:
    """Return the best intervals as values for `--set` options."""
    every = estimate.every()
    kinds = [tier.level for tier in question.policy.tiers]
    return [f"checkpoint.tiers.{index}.every_steps={every[kind]}" for index, kind in enumerate(kinds) if kind in every]


def _describe(
    question: Question, estimates: dict[str, GoodputEstimate], written: GoodputEstimate | None, memory: float
) -> str:
    scenario, size, best = question.scenario, question.size, estimates["as planned"]
    spread = scenario.spread
    head = columns(
        [
            ("state", f"{size}, {question.describes}"),
            (
                "on each node",
                f"{spread.node_bytes / 1e9:,.2f} GB; the memory tier takes {memory / 1e9:,.2f} GB",
            ),
            ("failures", f"{scenario.rates.total * 86400:,.3g} a day on {count(spread.nodes, 'node')}"),
        ]
    )
    named = {f"{name}, best intervals": one for name, one in estimates.items()}
    if written is not None:
        named = {"the spec's intervals": written} | named
    parts = [head, _table(_tiers(best, scenario.step_s)), _table(_compared(named, question.usd_per_hour))]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in (*_advice(estimates), *question.notes))])


def _advice(estimates: dict[str, GoodputEstimate]) -> list[str]:
    """Return a note for each tier without which the goodput would be higher."""
    planned = estimates["as planned"].goodput
    return [
        f"goodput is higher {name}: at these speeds and failure rates, the left-out tier costs more than it saves"
        for name, one in estimates.items()
        if one.goodput > planned + 1e-6
    ]


def _tiers(estimate: GoodputEstimate, step_s: float) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("tier", "every steps", "every", "blocks", "safe after", "for", "a day", "steps lost by each")
    ]
    for tier in estimate.tiers:
        of = ", ".join(name for name, rate in tier.by_class.items() if rate > 0) or "-"
        steps = f"{tier.every_steps:,}" if tier.every_steps is not None else "-"
        every = _time(tier.every_steps * step_s) if tier.every_steps is not None else "-"
        often = f"{tier.level.rate * 86400:.3g}"
        lost = f"{tier.lost_steps:,.1f}" if tier.level.rate else "-"
        rows.append((tier.kind, steps, every, _time(tier.level.cost), _time(tier.level.latency), of, often, lost))
    return rows


def _compared(named: dict[str, GoodputEstimate], usd_per_hour: float | None) -> list[tuple[str, ...]]:
    money = ("$ a failure", "$ a month") if usd_per_hour is not None else ()
    rows: list[tuple[str, ...]] = [("", "goodput", "steps lost a month", *money)]
    for name, estimate in named.items():
        row: tuple[str, ...] = (name, f"{100 * estimate.goodput:.3f} %", f"{estimate.lost_steps_a_month:,.0f}")
        if usd_per_hour is not None:
            dollars = estimate.dollars(usd_per_hour)
            row = (*row, f"{dollars['a_failure']:,.0f}", f"{dollars['a_month']:,.0f}")
        rows.append(row)
    return rows


def _table(rows: list[tuple[str, ...]]) -> str:
    """Return rows as a text table with minimal column widths. The first row is the head."""
    import io

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, title in enumerate(rows[0]):
        table.add_column(title, justify="left" if index == 0 or title == "for" else "right", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").splitlines())


def _time(seconds: float) -> str:
    """Return a number of seconds as text in a readable unit, such as `3.5 min`."""
    for limit, size, unit in ((1e-3, 1e-6, "us"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}" if seconds else "0"
    return f"{seconds / 3600:.3g} h" if seconds < 172800 else f"{seconds / 86400:.3g} d"
