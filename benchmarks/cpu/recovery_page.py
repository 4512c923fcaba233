"""What people and programs read of the recovery benchmark: the document, the table, the page."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkpoint.peers import PINS, read_pins
from recovery_peers import GLOO_TIMEOUT_S, LIGHTHOUSE, PEERS, nvrx_command, torchft_command
from recovery_report import LABELS, NVRX, OURS, RATIOS, TORCHFT, TORCHRUN, Round, summarize
from recovery_sides import FAIR, Setup

AIM = 15.0
"""hyperpod_ext is to take at most a fifteenth of torchrun's time to the first new step, an ordinary step off."""


def make_document(rounds: Sequence[Round], setup: Setup, not_measured: Mapping[str, str]) -> dict[str, Any]:
    """Everything that is known, as recovery.json has it. `not_measured`: sides that are not in every round, and why."""
    kill = f"rank={setup.kill_rank}@step={setup.kill_step}"
    size = f"--steps {setup.steps} --width {setup.width} --layers {setup.layers}"
    commands = {
        "benchmark": f"python benchmarks/cpu/recovery.py --rounds {len(rounds)} {size} --kill {kill}",
        OURS: shlex.join(setup.hp_ext_command()),
        TORCHRUN: shlex.join(setup.torchrun_command()),
    }
    pins = read_pins(PINS.read_text())
    loads = [recovery.load_average for one in rounds for recovery in one.values()]
    commands |= {NVRX: shlex.join(nvrx_command(setup)), TORCHFT: shlex.join(torchft_command(setup))}
    return {
        "about": "seconds from kill -9 of one worker to the first new step, in one run, in alternating order",
        "machine": describe_machine(),
        "job": {"ranks": setup.job.world_size, "kill": kill, "torchrun_saves_every_steps": setup.save_every},
        "commands": commands,
        "environment": FAIR,
        "pins": {side: list(pins[peer.name]) for side, peer in PEERS.items()},
        "not_measured": dict(not_measured),
        **summarize(rounds),
        "rounds": len(rounds),
        "load": [min(loads), max(loads)],
    }


def raw_rounds(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Every recovery by round and side."""
    return [{side: recovery.to_json() for side, recovery in one.items()} for one in rounds]


def describe_machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def make_table(document: Mapping[str, Any]) -> str:
    """Every side with its phases, then all of them beside each other."""
    lines = []
    for side, medians in document["medians"].items():
        lines.append(f"{side:<52}{'seconds':>9}{'since the kill':>17}")
        lines += [*_phase_lines(medians, LABELS[side]), ""]
    sides = list(document["medians"])
    lines.append(f"{'median of ' + _rounds(document):<46}" + "".join(f"{side:>14}" for side in sides))
    lines += [*_ratio_lines(document, sides), ""]
    lines += [f"not measured: {side}: {why}" for side, why in document["not_measured"].items()]
    lines += [f"{'yes' if good else 'NO':<4}{what}" for what, good in document["checks"].items()]
    return "\n".join([*lines, _verdict(document)])


def _phase_lines(medians: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    lines = []
    for name, label in labels.items():
        seconds, reached = medians["phases"][name], medians["since_kill"][name]
        figures = f"{'not seen':>9}" if seconds is None else f"{seconds:>9.3f}{reached:>17.3f}"
        lines.append(f"  {label:<50}{figures}")
    return lines


def _ratio_lines(document: Mapping[str, Any], sides: Sequence[str]) -> list[str]:
    medians, ratios = document["medians"], document["ratios"]
    lines = []
    for name, label in RATIOS.items():
        lines.append(f"  {label:<44}" + "".join(f"{medians[side][name]:>14.3f}" for side in sides))
        times = "".join(f"{ratios[side][name]['median']:>14.1f}" for side in sides if side != OURS)
        lines.append(f"  {'  times hyperpod_ext':<44}{'':>14}{times}")
    for name, label in (("ordinary_step", "an ordinary step"), ("steps_lost", "whole steps lost and made again")):
        lines.append(f"  {label:<44}" + "".join(f"{medians[side][name]:>14.4g}" for side in sides))
    return lines


def _verdict(document: Mapping[str, Any]) -> str:
    ratio = document["ratios"][TORCHRUN]["first_new_step_less_a_step"]
    met = "met" if ratio["median"] >= AIM else "NOT met"
    figures = f"ratio {ratio['median']:.1f}, least {min(ratio['rounds']):.1f}"
    return f"Aim, at most a fifteenth of torchrun's time to the first new step, one step off: {met} ({figures})"


def _rounds(document: Mapping[str, Any]) -> str:
    count = document["rounds"]
    return f"{count} round" if count == 1 else f"{count} rounds"


def _others(document: Mapping[str, Any]) -> str:
    """What to say of the peers, first of all."""
    said = [
        f"{of['first_new_step']['median']:.1f} times quicker than {side}"
        + (f", {of['all_ranks']['median']:.1f} times until all ranks train again" if side == TORCHFT else "")
        for side, of in document["ratios"].items()
        if side != TORCHRUN
    ]
    return "".join(f" {one[0].upper()}{one[1:]}." for one in said)


def _peer_lines(document: Mapping[str, Any], save_every: int) -> str:
    lines = []
    for side, peer in PEERS.items():
        about = peer.about.format(timeout=GLOO_TIMEOUT_S, save_every=save_every)
        pin = document["pins"][side][0].replace("==", " ")
        why = document["not_measured"].get(side)
        lines.append(f"- **{side}** ({pin}): {about}" + (f". Not measured: {why}." if why else "."))
    return "\n".join(lines)


def _command_lines(document: Mapping[str, Any]) -> str:
    commands = document["commands"]
    lighthouse = shlex.join(["torchft_lighthouse", *LIGHTHOUSE])
    return "\n".join([*commands.values(), lighthouse])


def make_page(document: Mapping[str, Any]) -> str:
    """recovery.md."""
    machine, job, ratio = document["machine"], document["job"], document["ratios"][TORCHRUN]["first_new_step"]
    environment = " ".join(f'{name}="{value}"' if " " in value else f"{name}={value}" for name, value in FAIR.items())
    save_every = job["torchrun_saves_every_steps"]
    return f"""\
# From `kill -9` to the first new step

`make bench-recovery` writes this page, [recovery.json](recovery.json) and the plot.

![Every recovery by phase](recovery.svg)

**{ratio["median"]:.1f} times quicker** than `torchrun --max-restarts` to the first new step
(rounds from {min(ratio["rounds"]):.1f} to {max(ratio["rounds"]):.1f}).{_others(document)}

```
{make_table(document)}
```

## What is measured

All sides train the small GPT of `examples/01-local` on {job["ranks"]} ranks of one machine (gloo): same model, text,
batches, random numbers, optimizer and number of steps. Another process kills the worker with SIGKILL (`{job["kill"]}`)
as soon as the worker has reported the beginning of that step.

- **{OURS}**: two local nodes of two workers, a snapshot in memory at each step.
- **{TORCHRUN}**: `torchrun --standalone --max-restarts 3`, a `torch.distributed.checkpoint` save every
  {save_every} steps, `dcp.load` of the newest one on start.
{_peer_lines(document, save_every)}

The systems take turns in one run, in alternating order. Ratios are medians of the ratios of rounds. All systems run
with this environment. The last two variables are for torchrun: without them, its ranks do not find each other after a
restart, and its store waits for the name resolver. torchft's torchrun runs without the third variable:

```
{environment}
```

Measured on {machine["cores"]} cores ({machine["cpu"]}), Python {machine["python"]}, torch {machine["torch"]},
load average {document["load"][0]:.1f} to {document["load"][1]:.1f} when the sides started.

```
{_command_lines(document)}
```

## How to read it

A phase ends when the last rank has finished it (the first exception: when the first survivor has raised it), and counts
only the time after the previous phase. Medians of phases need not add up to the median of the total. If torchrun's
agent ends the survivors before one of them raises an exception, that phase is not seen, and its time counts to the next
phase. The *first new step* is the first step that ends after the kill: for {OURS} the interrupted step, for {TORCHRUN}
and {NVRX} the step after their checkpoint. Only {TORCHFT} makes this step without the dead rank, on fewer samples. A
system is *back past the killed step* when it has made the interrupted step. *One ordinary step off* subtracts the
median step of the same run, so that only the recovery remains.

As its documentation states, {NVRX} cannot abort gloo: a survivor that is not the dead rank's neighbour waits for the
group's timeout. To be quicker on CPUs, {NVRX} would need a shorter timeout, which also ends slow steps, or an abort of
gloo. For NCCL, its intended backend, {NVRX} has such an abort. {NVRX} does not replace a process: it needs a process in
reserve, or continues with fewer ranks. Its store is in the process of rank 0, which must not die.

## Limits

- One machine, CPU and gloo, one fault at a time. On GPUs a new process also has to create its CUDA context, and
  NCCL its communicators; neither is measured.
- The model is small. Imports dominate torchrun's time; with a larger model, loading and lost steps would dominate.
- The number of steps that torchrun loses depends on the time since its last save; the default kill is halfway between
  two saves.
- All ranks share {machine["cores"]} cores, so four Python processes that import at the same time slow each other down.
  Other load slows all systems and spreads the ratios of rounds; the load average above shows the other load.
"""
