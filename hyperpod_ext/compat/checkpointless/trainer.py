"""Replacements for the classes of AWS's NeMo plugins. The classes work with Lightning's own Trainer:

    trainer = Trainer(strategy=CheckpointlessMegatronStrategy(), callbacks=[CheckpointlessCallback()], ...)
    trainer.fit(model, datamodule=MMAPDataModule(...))

NeMo and Megatron-core are not used.
"""

from __future__ import annotations

import gc
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from hyperpod_ext.compat.checkpointless.data import PositionedBatches
from hyperpod_ext.compat.checkpointless.wrap import current_run
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.adapters import check_adapter
from hyperpod_ext.integrations.lightning import Follow, ResilientStrategy
from hyperpod_ext.runtime.data.loader import ElasticDataLoader

__all__ = [
    "CheckpointlessAutoResume",
    "CheckpointlessCallback",
    "CheckpointlessCompatibleConnector",
    "CheckpointlessMegatronStrategy",
    "DataModuleEpochCallback",
    "HCTProgressBar",
]

_ONE_COPY = frozenset({"ddp", "num_distributed_optimizer_instances", "sequence_parallel"})
"""Options of Megatron's strategy that have no effect if each rank has a whole copy of the model."""


class CheckpointlessMegatronStrategy(ResilientStrategy):
    """Data parallelism over the job's ranks, with a whole copy of the model on each rank.

    The trainer must also have a CheckpointlessCallback.
    """

    def __init__(self, **options: Any) -> None:
        """Make the strategy. Raises JobFailedError for an option that divides the model among ranks."""
        run = current_run("CheckpointlessMegatronStrategy")
        check_adapter(run, "CheckpointlessMegatronStrategy", "lightning")
        undivided = {name for name, value in options.items() if name.endswith("_parallel_size") and value in (1, None)}
        if refused := sorted(options.keys() - _ONE_COPY - undivided):
            raise JobFailedError(
                f"CheckpointlessMegatronStrategy({refused[0]}={options[refused[0]]!r}): with `compat: aws` each rank "
                "has a copy of the model, and Megatron-core is not used",
                hint=f"Leave {refused[0]} out. To divide the model, use `mode: aws-checkpointless` with AWS's image, "
                "or FSDP2 in a loop of run.steps.",
            )
        gc.collect()  # free the previous call's trainer, which references the old process group
        super().__init__(run)


class CheckpointlessCallback(Follow):
    """Reports the trainer's steps to the run, and restores the trainer's state and position.

    The arguments are the arguments of AWS's class, and have no effect.
    """

    def __init__(
        self,
        enable_inprocess: bool = False,
        enable_checkpointless: bool = False,
        enable_checksum: bool = False,
        clean_tensor_hook: bool = False,
        clean_lightning_module: bool = False,
    ) -> None:
        super().__init__(current_run("CheckpointlessCallback"))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace the trainer's loader by one that can continue from a position in the data.

        Raises:
            JobFailedError: the data cannot be read by position, or `ckpt_path` is given.
        """
        if stage != "fit":
            return
        if trainer.ckpt_path is not None:
            raise JobFailedError(
                f"fit(ckpt_path={trainer.ckpt_path!r}): Lightning would load it again after each fault",
                hint="Load the weights in the code that builds the model.",
            )
        source = trainer.fit_loop._data_source
        self.attach(trainer, pl_module, _elastic(source.dataloader(), trainer.accumulate_grad_batches, self._run))
        source.instance, source.name = self.batches, ""

    def on_exception(self, *_: Any) -> None:
        """Close the generator of the run's steps."""
        self.close()

    def teardown(self, *_: Any, **__: Any) -> None:
        """Close the generator of the run's steps."""
        self.close()


def _elastic(loader: Any, accumulate: int, run: Any) -> Any:
    """Return an ElasticDataLoader over the samples of a DataLoader. Return any other loader unchanged.

    Args:
        loader: the trainer's loader.
        accumulate: number of micro-batches per step.
        run: the run, for its rank, world size and seed.

    Raises:
        JobFailedError: the DataLoader's sampler is not one of torch's samplers that can be read by position.
    """
    base = loader.base_dataloader if isinstance(loader, PositionedBatches) else loader
    if not isinstance(base, DataLoader):
        return base
    sampler = base.sampler
    if base.batch_size is None or type(sampler) not in (SequentialSampler, RandomSampler, DistributedSampler):
        raise JobFailedError(
            f"the training data comes from a DataLoader with a {type(sampler).__name__}, which cannot be read by "
            "position",
            hint="Use batch_size= and shuffle=, or give an ElasticDataLoader.",
        )
    shuffled = type(sampler) is RandomSampler or getattr(sampler, "shuffle", False)
    return ElasticDataLoader(
        base.dataset,
        global_batch_size=base.batch_size * run.world_size * accumulate,
        micro_batch_size=base.batch_size,
        rank=run.rank,
        world_size=run.world_size,
        seed=run.config.seed,
        shuffle="global" if shuffled else False,
        drop_last=True,
        collate=base.collate_fn,
        workers=base.num_workers,
    )


class CheckpointlessCompatibleConnector(_CheckpointConnector):
    """Lightning's own checkpoint connector, without changes, because CheckpointlessCallback restores the trainer's
    state."""


class CheckpointlessAutoResume:
    """Makes the trainer load no checkpoint file, because the job resumes from its checkpoint tiers. Options about a
    folder of NeMo checkpoints are accepted, but have no effect."""

    def __init__(self, restore_config: Any = None, resume_from_path: str | None = None, **_: Any) -> None:
        """Make the object. Raises JobFailedError if an option names a checkpoint with initial weights."""
        if restore_config is not None or resume_from_path is not None:
            raise JobFailedError(
                "CheckpointlessAutoResume: restore_config and resume_from_path name checkpoints of NeMo, which cannot "
                "be read without NeMo",
                hint="Load the weights in the code that builds the model.",
            )

    def setup(self, trainer: Any, model: Any = None, force_setup: bool = False) -> None:
        """Clear the trainer's `ckpt_path`, so that Lightning loads no checkpoint."""
        trainer.ckpt_path = None


class DataModuleEpochCallback(Callback):
    """Does nothing, because the loader's position is part of the job's state."""


class HCTProgressBar(TQDMProgressBar):
    """Lightning's own progress bar, with the arguments of AWS's class."""

    def __init__(self, refresh_rate: int = 25, total_steps: int = 250000) -> None:
        super().__init__(refresh_rate=refresh_rate)
