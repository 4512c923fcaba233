"""A small diffusion model of diffusers and Accelerate, with the checkpoints of Accelerate."""

from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader

import toy


def build():
    channels = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = UNet2DModel(sample_size=16, **channels, **blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    loader = DataLoader(toy.Images(), batch_size=4, shuffle=True)
    model, optimizer = build()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, toy.STEPS)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    noises = DDPMScheduler(num_train_timesteps=100)
    saved = sorted(Path(toy.OUT).glob("step-*"))
    first = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        first = int(saved[-1].name[5:])
        loader = accelerator.skip_first_batches(loader, first)
    for step, images in enumerate(loader, first):
        if step == toy.STEPS:
            break
        noise = torch.randn_like(images)
        times = torch.randint(0, 100, (len(images),))
        predicted = model(noises.add_noise(images, noise, times), times).sample
        loss = (predicted - noise).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % toy.SAVE_EVERY == 0:
            accelerator.save_state(f"{toy.OUT}/step-{step + 1:03}")


main()
