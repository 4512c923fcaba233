"""A training script run by PyTorch alone: nothing goes wrong, and what `@resilient` and `Run` are for is left out.

    expected = plain_run.run(script, ranks, folder)

Ranks are processes with a process group of gloo. Random numbers are drawn as a job draws them, from its seed, the step
and the rank. It costs a third of a job, and knows nothing of what a job does to come to the same numbers.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import warm
from torch.nn.parallel import DistributedDataParallel
from wrapped_ddp import wrap

import hyperpod_ext.runtime
from hyperpod_ext.runtime.state.seeding import seed_of, seed_step

SEED = 0


def run(script: Path, ranks: int, folder: Path) -> dict[str, float]:
    """The losses that the script logs, by step. What it writes itself is in `folder`."""
    folder.mkdir()
    processes = []
    for rank in range(ranks):
        with (folder / f"rank{rank}.log").open("wb") as log:
            env = {**os.environ, "HPX_RUN_DIR": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
            processes.append(warm.start("plain_run", [str(script), str(rank), str(ranks)], env=env, log=log))
    codes = [process.wait() for process in processes]
    assert not any(codes), "\n".join(path.read_text() for path in folder.glob("*.log"))
    losses: dict[str, float] = json.loads((folder / "losses-0.json").read_text())
    return losses


class PlainRun:
    """As much of a `Run` as scripts use that nothing happens to."""

    generation, step = 1, 0

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.losses: dict[int, float] = {}
        self._logged: dict[str, Any] = {}

    def keep(self, build: Callable[[], Any]) -> Any:
        torch.manual_seed(seed_of(SEED, 0, -1))
        return build()

    def restore(self, **_objects: Any) -> int:
        return 0

    def leave_out(self, *_objects: Any) -> None:
        pass

    def data_parallel(self, module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        return wrap(module, None, **options)  # torch's own, but for the order of sparse gradients

    def log(self, **metrics: Any) -> None:
        self._logged |= metrics

    def steps(self, total: int) -> Iterator[int]:
        for step in range(self.step + 1, total + 1):
            self._logged = {}
            seed_step(SEED, step, self.rank)
            yield step
            if "loss" in self._logged:
                self.losses[step] = float(self._logged["loss"])
            self.step = step


def main() -> None:
    script, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    folder = Path(os.environ["HPX_RUN_DIR"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    made = PlainRun(rank, ranks)
    hyperpod_ext.runtime.resilient = lambda train: lambda: train(made)  # type: ignore[assignment]
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    (folder / f"losses-{rank}.json").write_text(json.dumps(made.losses))
    dist.destroy_process_group()
