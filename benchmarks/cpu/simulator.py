"""The simulator beside real jobs: as many local runs of the example as asked for, killed at random, and as many
simulated ones with what those measured of steps and recoveries.

    python benchmarks/cpu/simulator.py --runs 50 --nodes 16

Start-up and the end of a job are left out of both: what is compared is the share of training time that was kept. The
simulated jobs have as many kills as the real ones, drawn in the same way. What a kill costs is measured from the kill
to the end of the first new step, less one step: what is made again after state is back (DDP's wrapper, the loader, the
first step's buffers) is time lost, too, though the report counts it under "other" and "steps".

The jobs of 16 nodes on a machine of 2 cores wait for one another's imports; give it an hour, or fewer nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperpod_ext.planner.rates import Rates
from hyperpod_ext.planner.recovery_tiers import Recovery
from hyperpod_ext.runtime.simulator.engine import Simulation
from hyperpod_ext.runtime.simulator.settings import Simulated, SimulatedTier

ROOT = Path(__file__).resolve().parents[2]
HP_EXT = Path(sys.executable).with_name("hp-ext")


@dataclass(frozen=True)
class Real:
    """What one real job did. Seconds."""

    kills: int
    steps: int
    kept: float
    recovery: float
    other: float
    recoveries: tuple[float, ...]

    def share(self, idle: float) -> float:
        """Of training, the share that was kept; `idle` is what a job without faults spends on neither."""
        lost = max(0.0, self.other - idle)
        return self.kept / (self.kept + self.recovery + lost)


def run(nodes: int, steps: int, kills: list[tuple[int, int]]) -> Real:
    """One real job of `nodes` nodes with one worker each."""
    with tempfile.TemporaryDirectory(prefix="hpx-sim-", dir="/tmp") as folder:
        spec = Path(folder) / "job.yaml"
        spec.write_text((ROOT / "examples" / "01-local" / "job.yaml").read_text())
        (spec.parent / "train.py").write_text((ROOT / "examples" / "01-local" / "train.py").read_text())
        command = [str(HP_EXT), "create-job", "-f", str(spec), "--target", "local", "--wait", "-o", "json"]
        command += ["--set", f"nodes={nodes}", "--set", "workers_per_node=1", "--set", f"global_batch_size={nodes}"]
        command += ["--set", f"args.1='{steps}'", "--set", "chaos.compare=false", "--set", "restart.max_restarts=1000"]
        command += [part for rank, step in kills for part in ("--kill", f"rank={rank}@step={step}")] or ["--no-kill"]
        environ = {**os.environ, "HPX_HOME": f"{folder}/home"}  # apart from jobs of the same name
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"a job failed:\n{done.stdout}\n{done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    seconds, recoveries = report["seconds"], report["recoveries"]
    step_s = seconds["steps"] / report["steps"]
    took = [sum(value for value in one["phases"].values() if value is not None) - step_s for one in recoveries]
    return Real(len(recoveries), report["steps"], seconds["steps"], seconds["recovery"], seconds["other"], tuple(took))


def draw_kills(draw: random.Random, most: int, steps: int) -> list[int]:
    """Steps at which a job is killed: from one to `most` of them, none at its very beginning or end."""
    return sorted(draw.sample(range(5, steps - 5), 1 + draw.randrange(most)))


class Killed(Simulation):
    """A simulated job with kills at given steps, as the real ones have them, instead of failures by the clock."""

    def share(self, kills: list[int], steps: int) -> float:
        """Share of the time kept, until `steps` steps are made."""
        for step in kills:
            self._recover(self._interval.ends(step - 1))  # an agent kills at the beginning of a step
        return steps * self._settings.step_s / self._interval.ends(steps)

    def _next_fault(self, moment: float) -> float:
        return float("inf")


def simulate(real: list[Real], nodes: int, most: int, runs: int) -> list[float]:
    """Shares kept by as many simulated jobs, with steps, recoveries and kills as the real ones had."""
    step_s = statistics.median(one.kept / one.steps for one in real)
    recovery = statistics.fmean(took for one in real for took in one.recoveries)
    settings = Simulated(
        nodes,
        step_s,
        {"memory": SimulatedTier(1)},
        Rates(1.0, 0.0, 0.0, "only processes are killed"),
        Recovery(process=recovery),
        redundant=True,
    )
    steps, draw = real[0].steps, random.Random(0)
    return [Killed(settings, seed).share(draw_kills(draw, most, steps), steps) for seed in range(runs)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=3, help="most kills of one job; drawn evenly from 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write all numbers there, as JSON")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    calm = run(args.nodes, args.steps, [])
    print(f"without a fault: {calm.steps} steps of {calm.kept / calm.steps:.3f} s, {calm.other:.2f} s of other")
    real: list[Real] = []
    for number in range(args.runs):
        steps = draw_kills(draw, args.kills, args.steps)
        real.append(run(args.nodes, args.steps, [(draw.randrange(args.nodes), step) for step in steps]))
        one = real[-1]
        print(f"{number + 1}/{args.runs}: {one.kills} kills, {100 * one.share(calm.other):.2f} % kept", flush=True)
    shares = [one.share(calm.other) for one in real]
    simulated = simulate(real, args.nodes, args.kills, max(200, args.runs))
    rows = [("real", shares), ("simulated", simulated)]
    for name, values in rows:
        print(
            f"{name:10} {100 * statistics.fmean(values):6.2f} % +- {100 * statistics.stdev(values):.2f} ({len(values)})"
        )
    apart = abs(statistics.fmean(shares) - statistics.fmean(simulated))
    spread = statistics.stdev(shares)
    print(f"apart by {100 * apart:.2f} points; the real jobs spread by {100 * spread:.2f}")
    if args.out is not None:
        found = {"nodes": args.nodes, "real": shares, "simulated": simulated, "jobs": [asdict(one) for one in real]}
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if apart <= spread else 1


if __name__ == "__main__":
    raise SystemExit(main())
