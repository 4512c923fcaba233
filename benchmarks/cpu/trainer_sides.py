"""One side of `trainer.py`: TorchTitan's trainer or examples/20-trainer, on each rank that torchrun starts.

    torchrun --nproc-per-node 2 trainer_sides.py SIDE FOLDER STEPS LENGTH BATCH

Rank 0 writes seconds and CPU seconds at the end of each step to FOLDER/SIDE.json.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "20-trainer"


class Clock:
    """Times at the ends of steps."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def end_step(self) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def write(self, file: Path) -> None:
        if os.environ["RANK"] == "0":
            file.write_text(json.dumps(self.ends))


def make_cpu_the_accelerator() -> None:
    """Let TorchTitan 0.2.2, which needs an accelerator, use the CPU. Call it before TorchTitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    properties = type("Properties", (), {"total_memory": 8 << 30, "name": "cpu"})
    torch.cpu.current_device = lambda: 0
    torch.cpu.get_device_name = lambda *_: "cpu"
    torch.cpu.get_device_properties = lambda *_: properties
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
    divide = FSDPModule.set_gradient_divide_factor

    def with_sums(module: FSDPModule, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
        divide(module, factor)

    FSDPModule.set_gradient_divide_factor = with_sums


def run_titan(clock: Clock, folder: Path, steps: int, length: int, batch: int) -> None:
    """Train TorchTitan's debug model in float32."""
    make_cpu_the_accelerator()
    import torchtitan.distributed.utils as groups
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    dist.init_process_group("gloo")
    groups.init_distributed = lambda *_, **__: dist.get_world_size()
    options = {
        "job.config_file": folder / "debug.toml",
        "training.steps": steps,
        "training.seq_len": length,
        "training.local_batch_size": batch,
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
    }
    trainer = Trainer(ConfigManager().parse_args([f"--{name}={value}" for name, value in options.items()]))
    step = trainer.train_step

    def timed(data: Any) -> None:
        step(data)
        clock.end_step()

    trainer.train_step = timed
    trainer.train()


def run_ours(clock: Clock, folder: Path, steps: int, length: int, batch: int) -> None:
    """Train the same shape with the example."""
    sys.path.insert(0, str(EXAMPLE))
    import metrics

    write = metrics.MetricsWriter.write

    def timed(writer: Any, *arguments: Any) -> None:
        write(writer, *arguments)
        clock.end_step()

    metrics.MetricsWriter.write = timed
    options = {
        "shape": "llama-debug",
        "steps": steps,
        "length": length,
        "micro-batch": batch,
        "evaluate-every": 10 * steps,
        "folder": folder / "ours",
    }
    sys.argv = ["train.py", *(f"--{name}={value}" for name, value in options.items())]
    runpy.run_path(str(EXAMPLE / "train.py"), run_name="__main__")


def main() -> None:
    side, folder, *numbers = sys.argv[1:]
    clock = Clock()
    {"titan": run_titan, "ours": run_ours}[side](clock, Path(folder), *map(int, numbers))
    clock.write(Path(folder) / f"{side}.json")


if __name__ == "__main__":
    main()
