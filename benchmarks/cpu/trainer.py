"""Measure tokens per second of examples/20-trainer and of TorchTitan's trainer, with TorchTitan's debug model.

    python benchmarks/cpu/trainer.py --rounds 5

Both train the same shape on two ranks with FSDP2, in float32, without compile and activation checkpointing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from publish import RESULTS, publish
from recovery_page import describe_machine
from recovery_sides import FAIR

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from integrations_env import install  # noqa: E402

SIDES = {"ours": "examples/20-trainer", "titan": "TorchTitan 0.2.2"}
RANKS, WARM_UP = 2, 5


def measure(side: str, folder: Path, steps: int, length: int, batch: int) -> tuple[float, float]:
    """Return the medians of tokens per second, and of tokens per CPU second of one rank, without the first steps."""
    python = install("trainers").with_name("python")
    script = Path(__file__).with_name("trainer_sides.py")
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), script]
    environment = {**os.environ, **FAIR, "HPX_HOME": str(folder / "home")}
    numbers = [str(steps), str(length), str(batch)]
    subprocess.run([*command, side, folder, *numbers], env=environment, stdout=sys.stderr, check=True, timeout=900)
    ends = json.loads((folder / f"{side}.json").read_text())[WARM_UP:]
    wall, cpu = (statistics.median(after[at] - before[at] for before, after in pairwise(ends)) for at in (0, 1))
    return RANKS * batch * length / wall, batch * length / cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="samples of each rank")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
                inputs = shutil.copy(ROOT / "tests" / "integrations" / "titan_inputs.py", scratch)
                subprocess.run([install("trainers").with_name("python"), inputs], check=True, timeout=200)
                found[side].append(measure(side, Path(scratch), args.steps, args.length, args.batch))
            print(f"round {number + 1}, {side}: {found[side][-1]}", file=sys.stderr)
    document = {
        "about": "tokens per second of two ranks, and tokens per CPU second of one rank, with TorchTitan's debug model",
        "machine": describe_machine(),
        "setup": {name: getattr(args, name) for name in ("steps", "length", "batch")},
        "tokens_per_s": {side: [round(wall) for wall, _ in rounds] for side, rounds in found.items()},
        "tokens_per_cpu_s": {side: [round(cpu) for _, cpu in rounds] for side, rounds in found.items()},
    }
    publish(args.out, "trainer", document, page(document))
    print(page(document))
    return 0


def page(document: dict) -> str:
    """The page docs/benchmarks/trainer.md."""
    machine, setup, rounds = document["machine"], document["setup"], len(document["tokens_per_s"]["ours"])
    rows = []
    for name, unit in (("tokens_per_s", "tokens per second"), ("tokens_per_cpu_s", "tokens per CPU second of a rank")):
        medians = {side: statistics.median(values) for side, values in document[name].items()}
        ranges = {side: f"{min(values):,} to {max(values):,}" for side, values in document[name].items()}
        cells = [f"{medians[side]:,.0f} ({ranges[side]})" for side in SIDES]
        rows.append(f"| {unit} | {cells[0]} | {cells[1]} | {medians['ours'] / medians['titan']:.2f} |")
    return "\n".join(
        [
            "# Speed of the example trainer",
            "",
            f"Both trainers train TorchTitan's debug model (6 layers of width 256) on {RANKS} ranks with FSDP2, on "
            f"CPU, in float32. Each rank has {setup['batch']} samples of {setup['length']} tokens per step. The table "
            f"has medians of {rounds} rounds in alternating order, with the range.",
            "",
            f"| | {SIDES['ours']} | {SIDES['titan']} | ratio |",
            "|---|---|---|---|",
            *rows,
            "",
            "The example runs under torchrun, with `@resilient`. Both trainers clip gradients and use fused AdamW. "
            f"Measured on {machine['cores']} cores ({machine['cpu']}), load average {machine['load_average'][0]}, "
            f"Python {machine['python']}, torch {machine['torch']}, by `make bench-trainer`.",
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
