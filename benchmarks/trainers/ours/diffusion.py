"""A small diffusion model of diffusers and Accelerate, with the job's snapshots."""

import torch
from diffusers import DDPMScheduler, UNet2DModel

import toy
from hyperpod_ext.integrations.accelerate import ResilientAccelerator
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader


def build():
    channels = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = UNet2DModel(sample_size=16, **channels, **blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@resilient
def main(run: Run) -> None:
    accelerator = ResilientAccelerator(run, cpu=True)
    loader = ElasticDataLoader(
        toy.Images(), global_batch_size=8, micro_batch_size=4, rank=run.rank, world_size=run.world_size
    )
    accelerator.register_for_checkpointing(loader)
    model, optimizer = run.keep(build)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, toy.STEPS)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    noises = DDPMScheduler(num_train_timesteps=100)
    for _, batches in zip(run.steps(toy.STEPS), loader.steps(), strict=False):
        for images, _weight in batches:
            noise = torch.randn_like(images)
            times = torch.randint(0, 100, (len(images),))
            predicted = model(noises.add_noise(images, noise, times), times).sample
            loss = (predicted - noise).square().mean()
            accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loader.ack(batches)
        run.log(loss=accelerator.reduce(loss.detach(), "mean"))


main()
