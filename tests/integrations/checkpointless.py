"""A Lightning module, with all names of tiers 2 to 4 of AWS's launch article."""
# ruff: noqa: E402, UP045  (as AWS's examples are written)

from hyperpod_checkpointless_training.inprocess.train_utils import wait_rank

wait_rank()

import sys
from types import SimpleNamespace
from typing import Optional

import torch
from hyperpod_checkpointless_training.dataloader.config import CacheResumeMMAPConfig
from hyperpod_checkpointless_training.dataloader.mmap_data_module import MMAPDataModule
from hyperpod_checkpointless_training.dataloader.utils import CheckpointlessDataModule
from hyperpod_checkpointless_training.inprocess.abort import CheckpointlessAbortManager, CheckpointlessFinalizeCleanup
from hyperpod_checkpointless_training.inprocess.health_check import CudaHealthCheck
from hyperpod_checkpointless_training.inprocess.train_utils import HPAgentK8sAPIFactory
from hyperpod_checkpointless_training.inprocess.wrap import HPCallWrapper, HPWrapper
from hyperpod_checkpointless_training.nemo_plugins.callbacks import CheckpointlessCallback
from hyperpod_checkpointless_training.nemo_plugins.checkpoint_connector import CheckpointlessCompatibleConnector
from hyperpod_checkpointless_training.nemo_plugins.checkpoint_manager import PEFTCheckpointManager
from hyperpod_checkpointless_training.nemo_plugins.datamodule_epoch_callback import DataModuleEpochCallback
from hyperpod_checkpointless_training.nemo_plugins.megatron_strategy import CheckpointlessMegatronStrategy
from hyperpod_checkpointless_training.nemo_plugins.patches import patch_megatron_optimizer
from hyperpod_checkpointless_training.nemo_plugins.resume import CheckpointlessAutoResume
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

patch_megatron_optimizer()
CASE = sys.argv[-1]


class Data(LightningDataModule):
    def train_dataloader(self):
        samples = TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(3)))
        return DataLoader(samples, batch_size=4, shuffle=True)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))

    def training_step(self, batch, _):
        (x,) = batch
        loss = (self.layers(x) - x.flip(1)).square().mean()
        print(f"loss {self.global_rank} {self.global_step} {loss.item():.17g}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(cfg):
    @HPWrapper(
        health_check=CudaHealthCheck(),
        hp_api_factory=HPAgentK8sAPIFactory(),
        abort_timeout=60.0,
        checkpoint_manager=PEFTCheckpointManager(enable_offload=True),
        abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
        finalize=CheckpointlessFinalizeCleanup(),
    )
    def run_main(cfg, caller: Optional[HPCallWrapper] = None):
        resume = CheckpointlessAutoResume(resume_from_directory="checkpoints", resume_if_exists=True)
        divided = {"tensor_model_parallel_size": 2} if CASE == "divided" else {"pipeline_model_parallel_size": 1}
        follow = [CheckpointlessCallback(enable_inprocess=True, enable_checkpointless=True)]
        trainer = Trainer(
            strategy=CheckpointlessMegatronStrategy(num_distributed_optimizer_instances=2, **divided),
            callbacks=[DataModuleEpochCallback(), *([] if CASE == "unreported" else follow)],
            accelerator="cpu",
            devices=2,
            num_nodes=1,
            max_steps=20,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fresume = resume
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
        trainer.wrapper = caller
        resume.setup(trainer)
        cached = MMAPDataModule(data_module=Data(), mmap_config=CacheResumeMMAPConfig(cache_dir=cfg.cache_dir))
        trainer.fit(Model(), datamodule=CheckpointlessDataModule(cfg=cfg, data_module=cached))

    run_main(cfg)


if __name__ == "__main__":
    main(SimpleNamespace(cache_dir="/dev/shm/pdl_cache"))
