"""What people and programs read of the checkpoint benchmark: the document, the tables, the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from recovery_page import describe_machine

from checkpoint.group import FAIR
from checkpoint.measure import COMPUTE_RATIO, KNOWN, KNOWN_SHARE, NEIGHBOURS, QUIET_S, WINDOWS_S, Bench
from checkpoint.report import (
    ALL_FIGURES,
    DRAIN_FIGURES,
    FIGURES,
    PEER_FIGURES,
    SAVES,
    STEADINESS,
    Figure,
    has_none,
    judge,
    summarize,
    survived,
    with_drain_ratios,
)
from checkpoint.systems import KINDS, OURS, SYSTEMS

Document = dict[str, Any]


def make_document(bench: Bench, command: str, before: Document | None = None) -> Document:
    """The figures, as checkpoint.json has them. `before`: an earlier document, whose figures stay for campaigns and
    systems that were not run now."""
    rows, failures, runs = bench.rows, [*bench.failures], [_run(command, bench)]
    states, tokens = bench.states, bench.tokens
    summary, alive = summarize(rows), survived(rows)
    if before is not None:
        now = {row["campaign"] for row in (*rows, *failures)}
        others = SYSTEMS.keys() - {system.name for system in bench.systems}

        def stays(campaign: str, system: str) -> bool:
            return campaign not in now or system in others

        for name, figure in ALL_FIGURES.items():
            known = before["medians"][name].items()
            summary[name] |= {system: found for system, found in known if stays(figure.campaign, system)}
        alive |= {system: found for system, found in before["survived"].items() if stays(SAVES, system)}
        failures = [one for one in before["failures"] if stays(one["campaign"], one["system"])] + failures
        runs = needed([*({"machine": before["machine"], **run} for run in before["runs"]), *runs])
        states = before["setup"]["states"] | states
        tokens = tokens or before["setup"]["tokens_a_step"]
    return {
        "about": "our checkpoint engine beside its peers: same state, one run, systems in turn in each round",
        "machine": describe_machine(),
        "runs": runs,
        "environment": FAIR,
        "setup": {
            "rounds": bench.rounds,
            "states": states,
            "tokens_a_step": tokens,
            "steps_a_window": bench.window_steps,
            "settle_s": bench.settle_s,
            "socket_streams": bench.streams,
        },
        "systems": {
            system.name: {
                "label": system.label,
                "about": system.about,
                "has": sorted(system.has),
                "shims": system.shims,
                "packages": list(bench.environments[system.peer].pins) if system.peer else [],
            }
            for system in SYSTEMS.values()
        },
        "medians": summary,
        "targets": judge(summary),
        "survived": alive,
        "failures": failures,
    }


def raw_rounds(bench: Bench) -> list[dict[str, Any]]:
    """Every row of a run."""
    return [_rounded(row) for row in with_drain_ratios(bench.rows)]


def needed(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of which rows are left: some system of theirs has not been asked again since. Oldest first, as given."""
    since: set[tuple[str, str]] = set()
    left = []
    for run in reversed(runs):
        asked = {(campaign, name) for campaign in run["campaigns"] for name in run.get("systems", SYSTEMS)}
        if not since.issuperset(asked):
            left.append(run)
        since.update(asked)
    return left[::-1]


def _run(command: str, bench: Bench) -> dict[str, Any]:
    """What was asked of whom, which campaigns it was, and how busy the machine was meanwhile."""
    loads = [row["load"] for row in bench.rows] or [0.0]
    shares = [row.get("neighbours", 0.0) for row in bench.rows] or [0.0]
    campaigns = sorted({str(row["campaign"]) for row in bench.rows})
    asked = [system.name for system in bench.systems]
    run = {"command": command, "campaigns": campaigns, "systems": asked, "load": [min(loads), max(loads)]}
    run |= {"neighbours": [median(shares), max(shares)]}
    return {**run, "machine": describe_machine()}


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}


def make_tables(document: Document) -> str:
    """All of it for a terminal, and for the page."""
    return "\n\n".join([_targets(document), _systems(document), _peers(document), _drains(document)])


def _targets(document: Document) -> str:
    lines = ["| hyperpod_ext | target | measured | n, least to most | |", "|---|---|---|---|---|"]
    for verdict in document["targets"]:
        found, wanted = verdict["ours"], STEADINESS.get(verdict["figure"])
        figure = ALL_FIGURES[wanted.figure if wanted else verdict["figure"]]
        target = f"{'>=' if verdict['least'] else '<='} {verdict['target']:g}{_unit(figure)}"
        value = verdict["measured"] if wanted else found and found["median"]
        measured = "not measured" if value is None else _number(value, figure)
        met = {True: "met", False: "**not met**", None: ""}[verdict["met"]]
        label = wanted.label if wanted else _kind(figure) + figure.label
        lines.append(f"| {label} | {target} | {measured} | {_spread(found) if found else ''} | {met} |")
    return "\n".join(lines)


def _kind(figure: Figure) -> str:
    """What stands before its label where other tables are not beside it."""
    if figure in DRAIN_FIGURES.values():
        return "upload to S3: "
    return "copy on a peer: " if figure in PEER_FIGURES.values() else ""


def _unit(figure: Figure) -> str:
    return {"x": " x", "%": " %", "": ""}[figure.unit]


def _systems(document: Document) -> str:
    """A row a system, a column a figure: first what a save costs, then what it is good for."""
    names = [name for name in SYSTEMS if name in _measured(document) or _failure(document, name)]
    figures, tables = list(FIGURES.items()), []
    cut = list(FIGURES).index("survives")
    for title, part in (("cost of a save", figures[:cut]), ("safety, memory, restore", figures[cut:])):
        lines = [
            f"| {title} | " + " | ".join(figure.label for _, figure in part) + " |",
            "|---" * (len(part) + 1) + "|",
        ]
        for name in names:
            cells = [_cell(document, name, key, figure) for key, figure in part]
            lines.append(f"| {SYSTEMS[name].label} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _cell(document: Document, system: str, key: str, figure: Figure) -> str:
    found = document["medians"][key].get(system)
    if found:
        return f"{_number(found['median'], figure)} ({_spread(found)})"
    if has_none(system, figure):
        return "has none"
    return "failed" if _failure(document, system) else "-"


def _number(value: float, figure: Figure) -> str:
    digits = 2 if abs(value) < 10 else (1 if abs(value) < 100 else 0)
    return f"{value:.{digits}f}{' %' if figure.unit == '%' else ''}"


def _spread(found: Mapping[str, float]) -> str:
    return f"{found['n']:g}: {found['min']:.3g} to {found['max']:.3g}"


def _peers(document: Document) -> str:
    lines = ["| copies to a peer, with the same trainer | hyperpod_ext |", "|---|---|"]
    for key, figure in PEER_FIGURES.items():
        found = document["medians"][key].get(OURS)
        cell = f"{_number(found['median'], figure)} ({_spread(found)})" if found else "-"
        lines.append(f"| {figure.label} | {cell} |")
    return "\n".join(lines)


def _drains(document: Document) -> str:
    names = list(document["medians"]["drain_gb_per_s"])
    if not names:
        return "Drains were not measured."
    lines = ["| upload to S3 | " + " | ".join(figure.label for figure in DRAIN_FIGURES.values()) + " |"]
    lines.append("|---" * (len(DRAIN_FIGURES) + 1) + "|")
    for name in sorted(names, key=lambda name: name != OURS):
        label = SYSTEMS[name].label if name in SYSTEMS else name
        found = [(document["medians"][key].get(name), figure) for key, figure in DRAIN_FIGURES.items()]
        cells = [f"{_number(each['median'], figure)} ({_spread(each)})" if each else "-" for each, figure in found]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _measured(document: Document) -> set[str]:
    return {name for found in document["medians"].values() for name in found}


def _failure(document: Document, system: str) -> list[str]:
    return [f"{each['what']}: {each['why']}" for each in document["failures"] if each["system"] == system]


def make_page(document: Document) -> str:
    """checkpoint.md."""
    machine, setup = document["machine"], document["setup"]
    environment = " ".join(f'{name}="{value}"' if " " in value else f"{name}={value}" for name, value in FAIR.items())
    return f"""\
# Checkpoints: cost of a save, safety and restore

`make bench-checkpoint` writes this page, [checkpoint.json](checkpoint.json) and the plot.

![Blocked and lost time of each system](checkpoint.svg)

Unless a unit is given, a figure is a ratio to `memcpy`: the time of a `copy_` of each tensor of the state into memory
that was written before, in the same process and round. Brackets after a figure have the number of rounds, the minimum
and the maximum. *Worst round / median* shows how far a single round can be from the median. For *lost by memcpy*, a
thread makes the copy of `memcpy` during the same training steps.

{make_tables(document)}

## What is measured

{_states(setup["states"])}
The systems are measured in batches: as many systems as fit into the machine's memory run at the same time, each in its
own processes. In each round, every system of the batch makes one save, one system after another, in an order that
changes from round to round. If other processes use more than {NEIGHBOURS:g} of a core, the next save waits for their
end, at most {QUIET_S:g} s. Training steps during other processes' work do not count.

- **Blocked**: the time from the call until the state may be changed, on the calling thread, less the time in which that
  thread waited for a core. The table shows this time of the slowest rank. The *first* save is made
  {setup["settle_s"]:g} s after the system was created.
- **Blocked, staged during a step**: for a save that is staged while the model computes, the time of the call and of the
  wait before the optimizer's step.
- **Training time lost**: the additional duration of a window of steps with a save, compared with the same number of
  steps without a save. A window begins with a save and ends when the save has no more work in the background, after at
  least {setup["steps_a_window"]} steps. Forward and backward pass of a step take at least as long as {COMPUTE_RATIO:g}
  copies of the state ({setup["tokens_a_step"]} tokens). With fewer tokens, the speed of memory would limit a step, and
  a copy would slow down the step more. A system may copy the state during the passes, but must end the copy before the
  optimizer's step. Systems that cannot copy during the passes copy before them. Because the durations of steps vary by
  more than the measured effect, windows are repeated until the standard error of their median is {KNOWN:g} copies or
  {100 * KNOWN_SHARE:g} % of the median, or for {WINDOWS_S:g} s per round. The copies of `memcpy` are made between the
  windows.
- **Time until a save survives kill -9**: the wall time from the call until the system reports the save as safe. As soon
  as the system reports the save as safe, every worker is killed with SIGKILL. New workers restore the state, and every
  tensor must be `torch.equal` to the saved tensor.
- **More memory**: the peak of the trainer's anonymous memory during two saves, less its memory before the first save,
  in percent of the state. A second column has the additional memory of the processes that the trainer started. Neither
  column includes shared memory, which the raw rounds of a run contain.
- **Restore**: the time of a restore into the existing tensors of a new process. After the restore, the restored tensors
  are compared with the saved tensors.
- **Copy on a peer**: two ranks run, each on its own node. The first rank trains, and its state is copied to the second
  rank, which has almost no state of its own. One core trains, and the other core sends and receives, like a free core
  of each node in a job. *Time until complete* is the time from the end of the save's own copy until the peer has the
  state; a figure below 0 means that the peer had the state before the save released it. For *plain copy*, a process
  sends the same number of bytes over {setup["socket_streams"]} sockets to another process, during the same training in
  the same round. No copy over sockets can be faster than a plain copy on this machine. A *low-priority plain copy* has
  the CPU priority of the memory servers' copies. For *both ways*, both ranks have a state of the same size, so one core
  does the work of two cores on two nodes. *Additional* time compares with a save that is not copied to the peer.
- **Restore from a peer**: the memory of a node is empty. The rank on this node restores its state from the peer, while
  the peer's rank does nothing. For comparison with a restore, the rank then receives the same
  number of bytes over {setup["socket_streams"]} plain sockets.
- **Upload to S3**: the upload to a local S3 server that discards all data, from the moment when the snapshot is sealed
  until its manifest is stored. CPU time is that of the client, without the server's process; for hyperpod_ext, CPU time
  includes the checksums. *Step during the upload / without* is the mean duration of a trainer's step during the upload,
  divided by the median duration of a step without an upload.

Number of kills after which all tensors were restored: {_survived(document) or "not measured"}.

{_about(document)}

{_failures(document)}
Every process runs with

```
{environment}
```

{_runs(document)}

## Limits

- The benchmark runs on one machine, with CPU and gloo: no GPU, no network between nodes, no TLS, no real S3. All
  connections use the loopback interface.
- The other systems write their files to memory (tmpfs). With files on a disk, the figures of these systems would be
  worse.
- The compared libraries and all ranks run on the same {machine["cores"]} cores. If there are as many trainers
  as cores, background work takes time from the trainers.
"""


def _runs(document: Document) -> str:
    """Ratios are of one run each; several runs have measured different things."""
    told = []
    for run in document["runs"]:
        machine = run["machine"]
        where = f"{machine['cores']} cores ({machine['cpu']}), Python {machine['python']}, torch {machine['torch']}"
        load = f"Load average {run['load'][0]:.1f} to {run['load'][1]:.1f} on {where}"
        if "neighbours" in run:
            load += ", other processes with {:.2f} of a core (median) to {:.2f}".format(*run["neighbours"])
        load += ", during the rounds of"
        told.append(f"{load}\n\n```\n{run['command']}\n```")
    title = "The figures of a system come from the last of the following runs that included the system:"
    return "\n\n".join([title, *told])


def _states(states: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for kind, found in states.items():
        ranks = (
            "1 rank" if KINDS[kind] == 1 else f"each of {KINDS[kind]} ranks, weights and moments DTensors (fully_shard)"
        )
        lines.append(f"- *{kind}*: {found['nbytes'] / 1e6:.0f} MB in {found['tensors']} tensors on {ranks}")
    return "The saved state is a GPT with its Adam moments, in one of two layouts:\n\n" + "\n".join(lines) + "\n"


def _survived(document: Document) -> str:
    return ", ".join(f"{SYSTEMS[name].label} {good} of {of}" for name, (good, of) in document["survived"].items())


def _about(document: Document) -> str:
    lines = ["| system | description | changes that let it run here |", "|---|---|---|"]
    for found in document["systems"].values():
        version = f" ({found['packages'][0]})" if found["packages"] else ""
        lines.append(f"| {found['label']}{version} | {found['about']} | {found['shims']} |")
    return "\n".join(lines)


def _failures(document: Document) -> str:
    failures: Sequence[Mapping[str, str]] = document["failures"]
    if not failures:
        return ""
    lines = [
        f"- {SYSTEMS[f['system']].label if f['system'] in SYSTEMS else f['system']}, {f['what']}" for f in failures
    ]
    reasons = [f": {each['why']}" for each in failures]
    return "Did not run:\n\n" + "\n".join(a + b for a, b in zip(lines, reasons, strict=True)) + "\n"
