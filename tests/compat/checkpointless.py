"""A loop in plain PyTorch, with the names of tiers 2 and 4 of AWS's launch article."""
# ruff: noqa: E402, UP045  (as AWS's examples are written)

from hyperpod_checkpointless_training.inprocess.train_utils import wait_rank

wait_rank()

from types import SimpleNamespace
from typing import Optional

import torch
import torch.distributed as dist
from hyperpod_checkpointless_training.dataloader.config import CacheResumeMMAPConfig
from hyperpod_checkpointless_training.dataloader.mmap_data_module import MMAPDataModule
from hyperpod_checkpointless_training.inprocess.abort import CheckpointlessAbortManager, CheckpointlessFinalizeCleanup
from hyperpod_checkpointless_training.inprocess.health_check import CudaHealthCheck
from hyperpod_checkpointless_training.inprocess.train_utils import HPAgentK8sAPIFactory
from hyperpod_checkpointless_training.inprocess.wrap import HPCallWrapper, HPWrapper
from hyperpod_checkpointless_training.nemo_plugins.checkpoint_manager import PEFTCheckpointManager
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 24


class Samples:
    def setup(self, stage=None):
        pass

    def train_dataloader(self):
        data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(3)))
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


class Noted(CheckpointlessFinalizeCleanup):
    def __call__(self, state=None, train_ex=None):
        print(f"finalize {state.rank}", flush=True)
        return super().__call__(state, train_ex)


def main(cfg):
    @HPWrapper(
        health_check=CudaHealthCheck(),
        hp_api_factory=HPAgentK8sAPIFactory(),
        abort_timeout=60.0,
        checkpoint_manager=PEFTCheckpointManager(enable_offload=True),
        abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
        finalize=Noted(),
    )
    def run_main(cfg, caller: Optional[HPCallWrapper] = None):
        dist.init_process_group("gloo")
        print(f"call {dist.get_rank()} {caller.seq}", flush=True)
        data = MMAPDataModule(data_module=Samples(), mmap_config=CacheResumeMMAPConfig(cache_dir=cfg.cache_dir))
        loader = data.train_dataloader()
        batches = (batch for _ in range(STEPS) for batch in loader)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        parallel = caller.run.data_parallel(model)
        for step in caller.run.steps(STEPS, **locals()):
            (x,) = next(batches)
            loss = (parallel(x) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"loss {dist.get_rank()} {step} {loss.item():.17g}", flush=True)

    run_main(cfg)


if __name__ == "__main__":
    main(SimpleNamespace(cache_dir="/dev/shm/pdl_cache"))
