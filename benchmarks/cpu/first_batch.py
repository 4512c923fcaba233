"""From the start of a process to its first batch, after `kill -9` deep in an epoch; beside StatefulDataLoader.

    python benchmarks/cpu/first_batch.py --rounds 5

2e7 samples, shuffled, batches of 8, two worker processes. Each side reads to the depth, saves its state there as it
would beside a checkpoint, and is killed. Then a new process loads that state: again and again, sides in turn.
torchdata is installed without its dependencies below .venv/bench; torch is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TORCHDATA = "torchdata==0.11.0"
FOLDER = ROOT / ".venv" / "bench" / "torchdata"
SAMPLES, BATCH, WORKERS = 20_000_000, 8, 2
SIDES = ("ours", "torchdata")


class Samples:
    """2e7 samples of 16 numbers that cost nothing: what is timed is the loader."""

    fingerprint = "first-batch"

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.arange(index, index + 16)


def ours(state: Path, depth: int) -> tuple[Any, Any]:
    """A function that gives the next batch, and one that saves the state."""
    from hyperpod_ext.runtime.data import ElasticDataLoader

    loader = ElasticDataLoader(
        Samples(), global_batch_size=BATCH, micro_batch_size=BATCH, workers=WORKERS, rank=0, world_size=1
    )
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    steps = loader.steps()

    def batch() -> Any:
        step = next(steps)
        loader.ack(step)
        return step.micro_batches[0]

    return batch, lambda: state.write_text(json.dumps(loader.state_dict()))


def torchdata(state: Path, depth: int) -> tuple[Any, Any]:
    """The same of StatefulDataLoader, as its documentation has it."""
    sys.path.append(str(FOLDER))
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=WORKERS)
    if state.exists():
        loader.load_state_dict(torch.load(state, weights_only=False))
    batches = iter(loader)
    return lambda: next(batches), lambda: torch.save(loader.state_dict(), state)


def child(side: str, state: Path, depth: int, started: float) -> None:
    """One process. Without a state it reads to the depth, saves, and is killed; with one it reads one batch."""
    import torch.utils.data  # noqa: F401  # what any training process has imported before it comes to its data

    imported = time.time()
    again = state.exists()
    batch, save = {"ours": ours, "torchdata": torchdata}[side](state, depth)
    if not again:
        for _ in range(depth):
            batch()
        save()
        os.kill(os.getpid(), signal.SIGKILL)
    first = batch()
    now = time.time()
    print(json.dumps({"import": imported - started, "data": now - imported, "first": int(first[0][0])}), flush=True)
    os._exit(0)  # not what is timed


def start(side: str, state: Path, depth: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, "--child", side, str(state), str(depth), str(time.time())]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def prepare(side: str, state: Path, depth: int) -> None:
    done = start(side, state, depth)
    if done.returncode != -signal.SIGKILL or not state.exists():
        raise SystemExit(f"{side} did not come to step {depth}:\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 2000, 20000])
    parser.add_argument("--page", type=Path, help="write docs/benchmarks/first-batch.md here")
    arguments = parser.parse_args()
    if not FOLDER.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), TORCHDATA]
        subprocess.run(pip, check=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for depth in arguments.depths:
            states = {side: Path(folder) / f"{side}-{depth}" for side in SIDES}
            for side in SIDES:
                prepare(side, states[side], depth)
            found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
            for _ in range(arguments.rounds):
                for side in SIDES:
                    found[side].append(json.loads(start(side, states[side], depth).stdout))
            for side in SIDES:
                assert len({one["first"] for one in found[side]}) == 1, "a state gave two different batches"
            ratios = [a["data"] / b["data"] for a, b in zip(found["ours"], found["torchdata"], strict=True)]
            medians = {side: statistics.median(one["data"] for one in found[side]) for side in SIDES}
            sizes = {side: states[side].stat().st_size for side in SIDES}
            whole = {side: statistics.median(one["import"] + one["data"] for one in found[side]) for side in SIDES}
            rows.append((depth, medians, statistics.median(ratios), whole, sizes))
            print(
                f"depth {depth:6}: ours {medians['ours']:.3f} s, StatefulDataLoader {medians['torchdata']:.3f} s, "
                f"median of ratios {statistics.median(ratios):.3f}; with torch's import {whole['ours']:.2f} and "
                f"{whole['torchdata']:.2f} s; state {sizes['ours']} and {sizes['torchdata']} bytes",
                flush=True,
            )
    if arguments.page:
        arguments.page.write_text(page(rows, arguments.rounds))


def page(rows: list[Any], rounds: int) -> str:
    """The results as docs/benchmarks has them."""
    import torch

    lines = [
        "# Time to the first batch after `kill -9`",
        "",
        f"`make bench-first-batch` writes this page. The benchmark reads {SAMPLES:,} shuffled samples in batches of "
        f"{BATCH}, with {WORKERS} worker processes, on {os.cpu_count()} cores, with torch {torch.__version__}, "
        f"{TORCHDATA}, Python {platform.python_version()}.",
        f"The figures are medians of {rounds} rounds, in which the two loaders take turns. Each loader reads the "
        "number of steps in the first column, saves its state and is killed.",
        "A new process loads the saved state, and continues.",
        "The seconds are the time from the end of `import torch` to the first batch in the new process.",
        "",
        "| depth (steps) | ours | StatefulDataLoader | median of ratios | with `import torch` | state, bytes |",
        "|---|---|---|---|---|---|",
    ]
    for depth, medians, ratio, whole, sizes in rows:
        lines.append(
            f"| {depth:,} | {medians['ours']:.3f} s | {medians['torchdata']:.3f} s | {ratio:.3f} "
            f"| {whole['ours']:.2f} / {whole['torchdata']:.2f} s | {sizes['ours']:,} / {sizes['torchdata']:,} |"
        )
    why = (
        "StatefulDataLoader computes the permutation of all samples before its first batch. The loader of hyperpod_ext "
        '("ours") computes only the positions of the samples that a step needs.'
    )
    return "\n".join([*lines, "", why, ""])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    else:
        main()
