"""Measure the seconds from `kill -9` to the first new step of one unchanged script, under `hp-ext run` and torchrun.

    python benchmarks/cpu/script_runs.py --rounds 5

The script is torchrun_train.py, which saves with torch.distributed.checkpoint. Both restart all ranks.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from publish import RESULTS, publish
from recovery_page import describe_machine
from recovery_report import Recovery
from recovery_sides import EXAMPLE, Setup, measure_restart, measure_torchrun

from hyperpod_ext.config.files.load import load
from hyperpod_ext.config.job.job import JobConfig

RUN, TORCHRUN = "hp-ext run", "torchrun"


def run_command(setup: Setup, folder: str = "FOLDER") -> list[str]:
    """The command of `hp-ext run`."""
    job = setup.job
    command = ["hp-ext", "run", "--nodes", str(job.nodes), "--workers", str(job.workers_per_node)]
    return [*command, "benchmarks/cpu/torchrun_train.py", *setup.arguments(folder)]


def measure_run(setup: Setup, scratch: Path) -> Recovery:
    """The script of torchrun's side under `hp-ext run`."""
    command = [str(Path(sys.executable).with_name("hp-ext")), *run_command(setup, str(scratch))[1:]]
    return measure_restart(setup, scratch, command, {"HPX_HOME": str(scratch / "home")})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    setup = Setup(load(JobConfig, EXAMPLE), steps=20, width=64, layers=2, kill_rank=2, kill_step=13)
    sides = {RUN: measure_run, TORCHRUN: measure_torchrun}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(args.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
                recovery = sides[side](setup, Path(scratch))
            seconds[side].append(round(recovery.first_new_step, 3))
            print(f"round {number + 1}, {side}: {seconds[side][-1]:.2f} s", file=sys.stderr)
    document = {
        "about": "seconds from kill -9 of one worker to the first new step of the same script, all ranks restarted",
        "machine": describe_machine(),
        "commands": {RUN: shlex.join(run_command(setup)), TORCHRUN: shlex.join(setup.torchrun_command())},
        "seconds": seconds,
        "medians": {side: statistics.median(found) for side, found in seconds.items()},
    }
    publish(args.out, "script-runs", document, page(document))
    print(page(document))
    return 0


def page(document: dict) -> str:
    """The page docs/benchmarks/script-runs.md."""
    medians, seconds, machine = document["medians"], document["seconds"], document["machine"]
    rows = [
        f"| `{command}` | {medians[side]:.2f} | {min(seconds[side]):.2f} to {max(seconds[side]):.2f} |"
        for side, command in document["commands"].items()
    ]
    return "\n".join(
        [
            "# Restart of an unchanged script",
            "",
            "The table has the seconds from a `kill -9` of one of four workers to the first new step, on CPU with "
            "gloo. torchrun and `hp-ext run` run the same script, and restart all ranks after the kill. The restarted "
            "ranks load the newest checkpoint of `torch.distributed.checkpoint`.",
            "",
            "| command | median, s | range, s |",
            "|---|---|---|",
            *rows,
            "",
            f"`hp-ext run` takes 1/{medians[TORCHRUN] / medians[RUN]:.1f} of torchrun's time. Measured on "
            f"{machine['cores']} cores ({machine['cpu']}), Python {machine['python']}, torch {machine['torch']}, "
            f"in {len(seconds[RUN])} rounds in alternating order, by `make bench-run`.",
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
