"""DeepSpeed's engine, as `test_deepspeed.py` runs it through faults: deepspeed_engine.py STAGE PRECISION MICRO_BATCHES
[STEPS [early]].

With two parameter groups, weight decay, a scheduler, clipped gradients, and an odd number of parameters, so that ZeRO
pads a part."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ext.integrations.deepspeed import ZeroOptimizer, keep_engine
from hyperpod_ext.runtime import Run, resilient

STEPS, BATCH = int(sys.argv[4]) if sys.argv[4:] else 16, 4


def build() -> Any:
    stage, precision, micro_batches = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu" if precision == "cpu" else "none"}},
    }
    if precision != "cpu":
        config |= {precision: {"enabled": True}} if precision in ("bf16", "fp16") else {}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.LayerNorm(65), nn.GELU(), nn.Dropout(0.1), nn.Linear(65, 33))
    groups = [{"params": [p for p in model.parameters() if p.ndim == n], "weight_decay": 0.1 * n} for n in (1, 2)]
    deepspeed.init_distributed()
    parallel = ModelParallel() if precision == "mpu" else None
    built = deepspeed.initialize(model=model, model_parameters=groups, config=config, mpu=parallel)
    return built if precision == "tuple" else built[0]


class ModelParallel:
    """Process groups of a model that is divided over all ranks, as Megatron passes them to DeepSpeed."""

    def __init__(self) -> None:
        self.alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def get_data_parallel_group(self) -> Any:
        return self.alone

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()


def write_digests(engine: Any, name: str) -> None:
    """Write digests of ZeRO's flat vectors, without their padding, to the folder that SAMPLES names."""
    digests = []
    state = ZeroOptimizer(engine).state_dict()
    for at, weights in enumerate(state["weights"]):
        length = sum(parameter.numel() for parameter in engine.optimizer.bit16_groups[at])
        for vector in (weights, *(v for v in state["state"].get(at, {}).values() if v.ndim)):
            digests.append(hashlib.sha256(vector.full_tensor()[:length].numpy().tobytes()).hexdigest())
    if dist.get_rank() == 0:
        Path(os.environ["SAMPLES"], name).write_text(json.dumps(digests))


@resilient
def main(run: Run) -> None:
    engine = keep_engine(run, build)
    write_digests(engine, f"start-{run.world_size}.json")
    for step in run.steps(STEPS):
        for number in range(1 if "early" in sys.argv else engine.gradient_accumulation_steps()):
            chance = torch.Generator().manual_seed(1000 * step + 10 * number + run.rank)
            x = torch.randn(BATCH, 33, generator=chance).to(next(engine.parameters()).dtype)
            loss = (engine(x) - x.roll(1)).float().square().mean()
            engine.backward(loss)
            engine.step()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        run.log(loss=mean, rate=engine.get_lr()[0])
    write_digests(engine, f"end-{run.world_size}.json")


if __name__ == "__main__":
    main()
