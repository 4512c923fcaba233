"""A training script for HyperPod's managed tiered checkpointing, as AWS's documentation writes one.

It knows nothing of this project. Run on 2 ranks; what it has learned or loaded is printed, for whoever started it.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig
from torch.distributed.checkpoint import async_save, load
from torch.distributed.fsdp import fully_shard

IN_MEMORY_CKPT_FREQ = 10
S3_CKPT_FREQ = 20


def report(what, step, model, optimizer):
    """One line a rank: sums of its shards of the parameters and of their second moments."""
    parameters = sum(p.to_local().double().sum().item() for p in model.parameters())
    moments = sum(s["exp_avg_sq"].to_local().double().sum().item() for s in optimizer.state.values())
    print(f"{what}: step {step} rank {dist.get_rank()} {parameters:.12f} {moments:.12e}", flush=True)


def main():
    dist.init_process_group(backend="cpu:gloo")
    saving = dist.new_group(backend="gloo")  # on GPUs training has NCCL, and saving has gloo to itself
    checkpoint_config = SageMakerCheckpointConfig(
        namespace=os.environ["TRAINING_JOB_NAME"],
        world_size=dist.get_world_size(),
        s3_tier_base_path=os.environ["S3_BASE_PATH"],
    )
    torch.manual_seed(0 if sys.argv[1] == "train" else 1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step():
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

    if sys.argv[1] == "train":
        future = None
        for training_step in range(1, 21):
            train_step()
            if training_step % IN_MEMORY_CKPT_FREQ == 0 or training_step % S3_CKPT_FREQ == 0:
                state_dict = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": training_step,
                }
                checkpoint_config.save_to_s3 = training_step % S3_CKPT_FREQ == 0
                storage_writer = SageMakerTieredStorageWriter(checkpoint_config=checkpoint_config, step=training_step)
                if future is not None and (failure := future.exception()):
                    print(f"Failure in saving previous checkpoint: {failure}")
                report("saved", training_step, model, optimizer)
                future = async_save(state_dict=state_dict, storage_writer=storage_writer, process_group=saving)
        future.result()
    else:
        train_step()  # the optimizer has state to load into
        for wanted in sys.argv[2:]:
            state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
            step = None if wanted == "latest" else int(wanted)
            storage_reader = SageMakerTieredStorageReader(checkpoint_config=checkpoint_config, step=step)
            load(state_dict, storage_reader=storage_reader)
            model.load_state_dict(state_dict["model"])
            optimizer.load_state_dict(state_dict["optimizer"])
            report(f"loaded {wanted}", state_dict["step"], model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
