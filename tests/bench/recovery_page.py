"""What people and programs read of the recovery benchmark: the document, the table, the page."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recovery_report import LABELS, OURS, RATIOS, TORCHRUN, Round, summarize
from recovery_sides import FAIR, Setup

AIM = 5.0
"""hyperpod_ext is to take at most a fifth of torchrun's time to the first new step."""


def make_document(rounds: Sequence[Round], setup: Setup) -> dict[str, Any]:
    """Everything that is known, as recovery.json has it."""
    kill = f"rank={setup.kill_rank}@step={setup.kill_step}"
    size = f"--steps {setup.steps} --width {setup.width} --layers {setup.layers}"
    commands = {
        "benchmark": f"python tests/bench/recovery.py --rounds {len(rounds)} {size} --kill {kill}",
        OURS: shlex.join(setup.hp_ext_command()),
        TORCHRUN: shlex.join(setup.torchrun_command()),
    }
    return {
        "about": "seconds from kill -9 of one worker to the first new step, in one run, in alternating order",
        "machine": _describe_machine(),
        "job": {"ranks": setup.job.world_size, "kill": kill, "torchrun_saves_every_steps": setup.save_every},
        "commands": commands,
        "environment": FAIR,
        **summarize(rounds),
        "rounds": [{side: recovery.to_json() for side, recovery in one.items()} for one in rounds],
    }


def _describe_machine() -> dict[str, Any]:
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
    """Both sides with their phases, then the ratios."""
    lines = []
    for side, labels in LABELS.items():
        lines.append(f"{side:<52}{'seconds':>9}{'since the kill':>17}")
        lines += [*_phase_lines(document["medians"][side], labels), ""]
    lines.append(f"{'median of ' + _rounds(document):<52}{OURS:>12}{TORCHRUN:>10}{'ratio':>8}")
    lines += [*_ratio_lines(document), ""]
    lines += [f"{'yes' if good else 'NO':<4}{what}" for what, good in document["checks"].items()]
    return "\n".join([*lines, _verdict(document)])


def _phase_lines(medians: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    lines = []
    for name, label in labels.items():
        seconds, reached = medians["phases"][name], medians["since_kill"][name]
        figures = f"{'not seen':>9}" if seconds is None else f"{seconds:>9.3f}{reached:>17.3f}"
        lines.append(f"  {label:<50}{figures}")
    return lines


def _ratio_lines(document: Mapping[str, Any]) -> list[str]:
    ours, theirs = document["medians"][OURS], document["medians"][TORCHRUN]
    lines = [
        f"  {label:<50}{ours[name]:>12.3f}{theirs[name]:>10.3f}{document['ratios'][name]['median']:>8.1f}"
        for name, label in RATIOS.items()
    ]
    lines.append(f"  {'an ordinary step':<50}{ours['ordinary_step']:>12.3f}{theirs['ordinary_step']:>10.3f}")
    lines.append(f"  {'whole steps lost and made again':<50}{ours['steps_lost']:>12g}{theirs['steps_lost']:>10g}")
    return lines


def _verdict(document: Mapping[str, Any]) -> str:
    ratio = document["ratios"]["first_new_step"]
    met = "met" if ratio["median"] >= AIM else "NOT met"
    figures = f"ratio {ratio['median']:.1f}, least {min(ratio['rounds']):.1f}"
    return f"Aim, at most a fifth of torchrun's time to the first new step: {met} ({figures})"


def _rounds(document: Mapping[str, Any]) -> str:
    count = len(document["rounds"])
    return f"{count} round" if count == 1 else f"{count} rounds"


def make_page(document: Mapping[str, Any]) -> str:
    """recovery.md."""
    machine, job, ratio = document["machine"], document["job"], document["ratios"]["first_new_step"]
    loads = [side["load_average"] for one in document["rounds"] for side in one.values()]
    environment = " ".join(f'{name}="{value}"' if " " in value else f"{name}={value}" for name, value in FAIR.items())
    save_every = job["torchrun_saves_every_steps"]
    return f"""\
# From `kill -9` to the first new step

`make bench-recovery` writes this page, [recovery.json](recovery.json) with every round, and the plot.

![Both recoveries by phase](recovery.svg)

**{ratio["median"]:.1f} times quicker** than `torchrun --max-restarts` to the first new step
(rounds from {min(ratio["rounds"]):.1f} to {max(ratio["rounds"]):.1f}).

```
{make_table(document)}
```

## What is measured

Both sides train the small GPT of `examples/01-local` on {job["ranks"]} ranks of one machine (gloo): same model,
text, batches, random numbers, optimizer and number of steps. A process outside of the worker kills it with
SIGKILL (`{job["kill"]}`) as soon as it has reported that it makes that step.

- **{OURS}**: two local nodes of two workers, a snapshot in memory at each step.
- **{TORCHRUN}**: `torchrun --standalone --max-restarts 3`, a `torch.distributed.checkpoint` save every
  {save_every} steps, `dcp.load` of the newest one on start.

The sides take turns in one run, and who goes first alternates. Ratios are medians of the ratios of rounds.
Both run with this environment; the last two are for torchrun, whose ranks otherwise do not find each other after
a restart, and whose store asks the resolver for names:

```
{environment}
```

Measured on {machine["cores"]} cores ({machine["cpu"]}), Python {machine["python"]}, torch {machine["torch"]},
load average {min(loads):.1f} to {max(loads):.1f} when the sides started.

```
{document["commands"]["benchmark"]}
{document["commands"][OURS]}
{document["commands"][TORCHRUN]}
```

## How to read it

A phase ends when the last rank has come that far (an exception: when the first survivor has), and counts only
what it adds to the phases before it. Medians of phases need not add up to the median of the whole. Where torchrun's
agent ends the survivors before one of them has its exception, that phase is not seen and counts to the next.
The *first new step* is the first that all ranks have made after the kill: for {OURS} the one that was
interrupted, for torchrun the one after its checkpoint. It is *back past the killed step* when all ranks have made
the interrupted step. *One ordinary step off* takes the median step of the same run from both sides: what is left
is the recovery alone.

## Limits

- One machine, CPU and gloo, one fault at a time. On GPUs a new process also has to create its CUDA context, and
  NCCL its communicators; neither is measured.
- The model is small. Imports dominate torchrun's time; with a larger model, loading and the lost steps would.
- How many steps torchrun loses depends on how long before the kill it saved; the default kill comes in the
  middle between two saves.
- All ranks share {machine["cores"]} cores, so four Pythons that import at once wait for each other. Other load makes
  both sides slower and the ratios of rounds differ; the load average above tells how much of it there was.
"""
