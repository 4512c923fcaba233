"""DeepSpeed's engine with ZeRO-2, with DeepSpeed's own checkpoints."""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import toy

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    engine.load_checkpoint(toy.OUT)
    sampler = DistributedSampler(toy.Rotated(), dist.get_world_size(), dist.get_rank())
    loader = DataLoader(toy.Rotated(), batch_size=4, sampler=sampler)
    for step, (x, y) in enumerate(loader, 1):
        if step <= engine.global_steps:
            continue
        engine.backward((engine(x) - y).square().mean())
        engine.step()
        if step % toy.SAVE_EVERY == 0:
            engine.save_checkpoint(toy.OUT)
        if step == toy.STEPS:
            break


main()
