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
        f"{OURS} is {of['first_new_step']['median']:.1f} times faster than {side}"
        + (f", and {of['all_ranks']['median']:.1f} times faster until all ranks train" if side == TORCHFT else "")
        + "."
        for side, of in document["ratios"].items()
        if side != TORCHRUN
    ]
    return " ".join(said)


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

From the kill to the first new step, {OURS} is **{ratio["median"]:.1f} times faster** than
`torchrun --max-restarts` (in single rounds {min(ratio["rounds"]):.1f} to {max(ratio["rounds"]):.1f} times).
{_others(document)}

```
{make_table(document)}
```

## What is measured

All systems train the small GPT of `examples/01-local` on {job["ranks"]} ranks of one machine with gloo. Model, text,
batches, random numbers, optimizer and number of steps are the same for all systems. Another process kills a worker with
SIGKILL as soon as the worker has reported the beginning of a step (`{job["kill"]}`).

- **{OURS}** runs on two local nodes with two workers each, and makes a snapshot in memory at each step.
- **{TORCHRUN}** runs as `torchrun --standalone --max-restarts 3`. The script saves a checkpoint with
  `torch.distributed.checkpoint` every {save_every} steps, and loads the newest checkpoint when it starts.
{_peer_lines(document, save_every)}

In each round, every system is measured once, in alternating order. Ratios are medians of the ratios of rounds. All
systems run with the environment variables below. `TORCH_DISABLE_SHARE_RDZV_TCP_STORE` and `RES_OPTIONS` are for
torchrun: without these variables, the ranks do not find each other after a restart, and torchrun's store waits for the
name resolver. For torchft, `TORCH_DISABLE_SHARE_RDZV_TCP_STORE` is not set:

```
{environment}
```

Measured on {machine["cores"]} cores ({machine["cpu"]}), Python {machine["python"]}, torch {machine["torch"]},
load average {document["load"][0]:.1f} to {document["load"][1]:.1f} at the start of each measurement.

```
{_command_lines(document)}
```

## How to read it

A phase ends when the last rank has finished the phase. The phase of the first exception ends when the first survivor (a
rank that was not killed) has raised an exception. The seconds of a phase count from the end of the previous phase. The
medians of the phases need not add up to the median of the total. If torchrun's agent ends the survivors before one of
them raises an exception, the time until the first exception counts to the next phase. The *first new step* is the first
step that ends after the kill. The first new step of {OURS} is the interrupted step. The first new step of {TORCHRUN}
and {NVRX} is the step after their checkpoint. {TORCHFT} makes the first new step without the dead rank, on fewer
samples. A system is *back past the killed step* when it has made the interrupted step. *One ordinary step off* means
that the median duration of a step is subtracted, so that only the recovery remains.

As the documentation of {NVRX} states, {NVRX} cannot abort gloo, so a survivor that is not the dead rank's neighbour
waits for the timeout of the process group. With a shorter timeout, {NVRX} would be faster on CPUs, but the timeout
would also end slow steps. {NVRX} can abort NCCL, its intended backend. {NVRX} does not replace a process: the job needs
a process in reserve, or continues with fewer ranks. The store of {NVRX} is in the process of rank 0, so rank 0 must not
die.

## Limits

- The benchmark uses one machine, CPUs and gloo, with one fault at a time. On GPUs, a new process must also create its
  CUDA context, and NCCL must create its communicators; these times were not measured.
- The model is small, so imports are the largest part of torchrun's time. With a larger model, loading the checkpoint
  and repeating lost steps would be the largest part.
- The number of steps that torchrun loses depends on the time since the last save. In this benchmark, the kill is
  halfway between two saves.
- All ranks share {machine["cores"]} cores, so four Python processes that import at the same time slow each other down.
  Other processes on the machine slow all systems down, and make the ratios of rounds differ more. The load average
  above shows how busy the machine was.
"""
