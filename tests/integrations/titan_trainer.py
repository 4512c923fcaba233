"""TorchTitan's own Trainer, FSDP2 over all ranks, as `test_trainers.py` runs it through faults.

TorchTitan asks for an accelerator. What stands between it and a CPU is in `on_cpu`, and none of that is ours to mend.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

HERE = Path(__file__).parent


def on_cpu() -> None:
    """Have TorchTitan take the CPU for its device; before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    names = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: type("Properties", (), {"total_memory": 8 << 30, "name": "cpu"}),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda *_: None,
        "current_device": lambda: 0,
    }
    for name, stand_in in names.items():
        if name == "current_device" or not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, stand_in)
    divide = FSDPModule.set_gradient_divide_factor

    def with_sums_alone(self: FSDPModule, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
        divide(self, factor)

    FSDPModule.set_gradient_divide_factor = with_sums_alone  # type: ignore[method-assign]


on_cpu()

import torch.distributed as dist  # noqa: E402
import torchtitan.distributed.utils as titan_groups  # noqa: E402
from torchtitan.components.checkpoint import ModelWrapper  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from hyperpod_ext.integrations.titan import RunCheckpointer  # noqa: E402
from hyperpod_ext.runtime import Run, resilient  # noqa: E402

STEPS = 16


@resilient
def train(run: Run) -> None:
    def build() -> Any:
        os.environ.setdefault("LOCAL_RANK", "0")
        titan_groups.init_distributed = lambda *_, **__: dist.get_world_size()  # the job's own are there
        return Trainer(ConfigManager().parse_args(["--job.config_file", str(HERE / "debug.toml")]))

    trainer = run.keep(build)
    trainer.metrics_processor.log = lambda _step, loss, *_, **__: run.log(loss=loss)
    trainer.checkpointer = RunCheckpointer(
        run,
        total=STEPS,
        model=ModelWrapper(trainer.model_parts),
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        dataloader=trainer.dataloader,
        train_state=trainer,
    )
    with trainer.checkpointer:
        trainer.train()


train()
