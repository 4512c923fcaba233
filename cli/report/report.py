"""The command `hp-ext report`, and functions that format the result of a job as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from hyperpod_ext.planner.advice_model import phase_name
from hyperpod_ext.runtime.events.report import GIVE_A_GENERATOR, unseeded_text

from ..command import JOB, Command, output_option
from ..output import columns, count, print_result, say
from .page import NOTHING_TO_CHANGE
from .units import duration

_SOURCES = {
    "live": "a live rank",
    "memory": "the node's memory",
    "self": "each process itself",
    "fresh": "a fresh start",
    "script": "a checkpoint that the script loads itself",
}
"""Texts for sources of restored state, by the name of the source. A source without a text is shown by its name."""
_WHY = {
    "lost": "a node was lost",
    "leave": "a node left",
    "order": "as requested",
    "move": "a node's ranks moved to a spare",
    "nodes": "nodes joined",
    "continued": "lost ranks are missing",
    "rejoined": "lost ranks are back",
}


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext report tiny-gpt
  hp-ext report tiny-gpt --page report.html
  hp-ext report ./run/events.jsonl --beside ./other-run
  hp-ext report s3://bucket/prefix/tiny-gpt
  hp-ext report tiny-gpt --usd-per-hour 98.32 -o json | jq '.advice[]'""",
)
@click.argument("run", type=JOB, metavar="[RUN]", required=False)
@click.option(
    "-f", "--file", type=click.Path(), metavar="FILE", help="A job's spec, to read events from its durable tiers."
)
@click.option("--page", type=click.Path(dir_okay=False), metavar="FILE", help="Also write the report as one HTML page.")
@click.option("--beside", "other", metavar="RUN", help="Another run to compare with, such as a run without faults.")
@click.option(
    "--usd-per-hour",
    type=click.FloatRange(min=0, min_open=True),
    metavar="USD",
    help="Price of all nodes of the job per hour, to show how much money advice would save.",
)
@output_option()
def command(
    run: str | None, file: str | None, page: str | None, other: str | None, usd_per_hour: float | None, output: str
) -> None:
    """Show the faults of an ended job, their cost, and how the job has used its time.

    RUN is the name or URL of a job, or a job's checkpoint folder such as s3://bucket/prefix/JOB, or a path. RUN is
    read as a path if it is not a URL, and contains a slash or ends in .json or .jsonl. The path names a job's folder, a
    result.json or report.json, or the events.jsonl of a job without a report.
    """
    from hyperpod_ext.planner.advice import advise

    from .runs import compare, read_kept_run, read_run

    if (run is None) == (file is None):
        raise click.UsageError("Name one run, for example tiny-gpt, s3://bucket/prefix/tiny-gpt or -f job.yaml")
    result = read_run(run) if run is not None else read_kept_run(file or "")
    if other is not None:
        result = compare(result, read_run(other))
    advice = advise(result) if "phases" in result else []
    result["advice"] = [one.to_json(usd_per_hour) for one in advice]
    if page is not None:
        from .page import make_page

        Path(page).write_text(make_page(result), encoding="utf-8")
        say(f"the page is in {page}")
    print_result(result, output, "\n\n".join(filter(None, (describe_result(result), _last_word(result)))))
    warn(result)


def _last_word(result: Mapping[str, Any]) -> str:
    """Return the error and the hint of a failed job as text; empty for other jobs."""
    error = result.get("error") or {}
    return "\n".join(str(error[part]) for part in ("message", "hint") if error.get(part))


def warn(result: Mapping[str, Any]) -> None:
    """Print the warnings in the result of a job."""
    for warning in result.get("warnings") or ():
        say(f"warning: {warning}")


def why_it_differs(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why a job differs from its comparison run without faults, and a hint. None if the two runs are equal, or
    were not compared."""
    if False not in (result.get("loss_equal"), result.get("weights_equal")):
        return None
    unsaved, unseeded = ", ".join(result.get("in_no_snapshot", ())), result.get("unseeded_loaders", ())
    if result.get("weights_equal") is not False:
        if "loss" in result.get("differs_by_rank", ()):
            what = "the losses differ from the losses of the run without faults, because ranks log different losses"
            return (
                what,
                "Pass the same number to run.log on every rank: average the loss over all ranks, or log it as "
                "rank_loss.",
            )
        what = "the weights are equal, but the logged losses differ"
        if not unsaved:
            return (
                what,
                "Training repeats exactly. Do not pass values to run.log that depend on a clock or on anything "
                "outside the step.",
            )
    else:
        what = "the job differs from its run without faults, so its steps do not repeat exactly"
    whys, hints = [], []
    if unseeded:
        whys, hints = [unseeded_text(unseeded).removesuffix(".")], [GIVE_A_GENERATOR]
    if unsaved:
        whys.append(f"{unsaved} changed between steps, but is in no snapshot")
        hints.append("Pass it to run.restore, in an object with state_dict() and load_state_dict().")
    if whys:
        return "; ".join([what, *whys]), " ".join(hints)
    if ranks := {str(each["differs"]) for each in result.get("continued", ()) if each["differs"]}:
        what = (
            f"the job differs from its run without faults: it continued without lost ranks ({'; '.join(sorted(ranks))})"
        )
        return (
            what,
            "For equal bits use `samples: constant`, ElasticDataLoader, and run.data_parallel(model, "
            "reproducible=True).",
        )
    return (
        what,
        "Build models inside run.keep, which is seeded. Draw random numbers inside the steps and in the rank's own "
        "process: worker processes of a DataLoader draw other numbers after a fault.",
    )


def saving(advice: Mapping[str, Any]) -> str:
    """Return the maximum time and money that an advice would have saved, as text. Empty if unknown."""
    if not advice["gain_s"]:
        return ""
    money = f", ${advice['gain_usd']:,.2f}" if advice.get("gain_usd") else ""
    return f" [up to {duration(advice['gain_s'])}{money}]"


def describe_result(result: Mapping[str, Any]) -> str:
    """Return the result of a job as text: its faults, their cost, and the comparison with the run without faults."""
    earlier, made = result.get("resumed_step", 0), count(result["steps"], "step")
    if earlier:
        made = f"steps {earlier + 1} to {result['steps']}" if result["steps"] else f"no step after the first {earlier}"
    parts = [f"{result['name']}: {result['state']}, {made} on {count(result['world_size'], 'rank')}"]
    if earlier:
        source = f"the checkpoint {result['resumed_from']}" if result.get("resumed_from") else "memory"
        parts.append(f"resumed an earlier run of this name after step {earlier}, from {source}")
    if result["steps"]:
        parts.append(_compared(result))
    parts += [_recovery(recovery) for recovery in result["recoveries"]]
    if resizes := result.get("resizes"):
        parts.append("\n".join(_resize(resize) for resize in resizes))
    if last := _last_fault(result):
        parts.append(last)
    if result["steps"]:
        parts.append(_figures(result))
    if "advice" in result and "phases" in result:
        advice = [f"- {each['text']}{saving(each)}" for each in result["advice"]]
        parts.append("\n".join(["what to change:", *(advice or [f"- {NOTHING_TO_CHANGE}"])]))
    return "\n\n".join(parts)


def _last_fault(result: Mapping[str, Any]) -> str:
    """Return a text about the fault that ended the job; empty if the job recovered from every fault."""
    faults = result.get("faults", [])
    if result["state"] != "failed" or not faults or len(faults) <= len(result["recoveries"]):
        return ""
    return f"ended by: {_place(faults[-1])}: {faults[-1]['cause']}"


def _place(fault: Mapping[str, Any]) -> str:
    phase = f" ({fault['phase']})" if fault.get("phase") else ""
    return f"rank {fault['rank']} on node {fault['node']}, step {fault['step']}{phase}"


def _recovery(recovery: Mapping[str, Any]) -> str:
    fault = recovery["fault"]
    head = f"{_place(fault)}: {fault['cause']}"
    rows = [("phase", "seconds")]
    rows += [(phase_name(phase), _seconds(took)) for phase, took in recovery["phases"].items()]
    rows.append(("total", _seconds(recovery["seconds"])))
    table = columns([(name, took.rjust(8)) for name, took in rows]).splitlines()
    kept = (
        "the other ranks kept their processes"
        if recovery["survivor_pids_kept"]
        else "processes of other ranks were replaced too"
    )
    source = _SOURCES.get(recovery["source"], recovery["source"])
    went_on = f"continued from step {recovery['resumed_step']} with the state of {source}; {kept}"
    tail = went_on if source else "the job ended before it could continue"
    return "\n".join([head, *(f"  {line}" for line in [*table[:-1], "-" * len(table[0]), table[-1]]), tail])


def _resize(resize: Mapping[str, Any]) -> str:
    kept = "processes kept" if resize["pids_kept"] else "processes replaced"
    moved = f"{resize['bytes_moved'] / (1 << 20):.1f} MiB from other nodes"
    why = _WHY.get(resize["cause"], resize["cause"])
    head = f"{resize['of']} -> {count(resize['nodes'], 'node')} after step {resize['step']} ({why}): "
    return f"{head}{resize['pause_s']:.2f} s without a step, {moved}, {kept}"


def _compared(result: Mapping[str, Any]) -> str:
    rows = [
        ("steps lost", str(result["steps_lost"])),
        ("loss equal to the run without faults", _yes_or_no(result["loss_equal"])),
        ("weights equal", _yes_or_no(result["weights_equal"])),
    ]
    return columns(rows)


def _figures(result: Mapping[str, Any]) -> str:
    seconds = result["seconds"]
    wall = seconds.get("wall")
    of = f"{seconds.get('steps', 0.0):.1f} s of {wall:.1f} s" if wall else "-"
    rows = [("share of time kept", f"{100 * result['goodput']:.1f} % ({of})")]
    if wall:
        others = [name for name in ("startup", "recovery", "other") if name in seconds]
        rest = [f"{phase_name(name)} {seconds[name]:.1f} s" for name in others]
        rows.append(("where the rest went", ", ".join(rest)))
    if phases := _phases(result.get("phases") or {}):
        rows.append(("each rank's time, on average", phases))
    for tier in result.get("durable") or ():
        step = "none" if tier["newest_step"] is None else tier["newest_step"]
        rows.append(("newest durable step", f"{step}, in {tier['tier']}"))
    if result["undisturbed"]:
        rows.append(("the run without faults", f"{100 * result['undisturbed']['goodput']:.1f} %"))
    for name, value in result["metrics"].items():
        label = name.replace("_", " ").replace("held out", "held-out")
        rows.append((label, f"{value:.4f}" if isinstance(value, float) else str(value)))
    return columns(rows)


def _phases(phases: Mapping[str, Mapping[str, float]]) -> str:
    """Return the share of each phase in the time of all ranks, as text. Shares below 0.1 % are left out."""
    sums: dict[str, float] = {}
    for of_rank in phases.values():
        for phase, seconds in of_rank.items():
            sums[phase] = sums.get(phase, 0.0) + seconds
    total = sum(sums.values())
    shares = {phase: seconds / total for phase, seconds in sums.items()} if total else {}
    return ", ".join(f"{phase_name(phase)} {100 * share:.1f} %" for phase, share in shares.items() if share > 1e-3)


def _seconds(took: float | None) -> str:
    return "-" if took is None else f"{took:.3f}"


def _yes_or_no(equal: bool | None) -> str:
    return {True: "yes", False: "NO", None: "not compared"}[equal]
