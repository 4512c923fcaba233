"""DeepSpeed's engine with ZeRO-2, with the job's snapshots."""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import toy
from hyperpod_ext.integrations.deepspeed import keep_engine
from hyperpod_ext.runtime import Run, resilient

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def build() -> deepspeed.DeepSpeedEngine:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    return engine


@resilient
def main(run: Run) -> None:
    engine = keep_engine(run, build)
    sampler = DistributedSampler(toy.Rotated(), dist.get_world_size(), dist.get_rank())
    loader = DataLoader(toy.Rotated(), batch_size=4, sampler=sampler)
    batches = enumerate(loader, 1)
    for step in run.steps(toy.STEPS):
        x, y = next(batch for number, batch in batches if number == step + 1)
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        run.log(loss=mean)


main()
