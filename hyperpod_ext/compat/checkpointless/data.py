"""Replacements for AWS's data modules and loaders, which wrap the script's own data module."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.world import world_of_this_process
from hyperpod_ext.runtime.training.epochs import EpochData

if TYPE_CHECKING or importlib.util.find_spec("lightning"):
    from lightning.pytorch import LightningDataModule  # Lightning's Trainer accepts only subclasses of this class
else:
    LightningDataModule = object

__all__ = ["CacheResumeMMAPConfig", "CheckpointlessDataModule", "MMAPConfig", "MMAPDataModule", "SkipDataLoader"]


@dataclass
class MMAPConfig:
    """Base class for the settings of MMAPDataModule."""


@dataclass
class CacheResumeMMAPConfig(MMAPConfig):
    """Settings of AWS's cache of batches, which have no effect, because this project does not cache batches.

    Raises:
        JobFailedError: `enable_batch_encryption` is set.
    """

    cache_dir: str = "/dev/shm/pdl_cache"
    prefetch_length: int = 10
    val_prefetch_length: int = 10
    lookback_length: int = 2
    checkpoint_frequency: int | None = None
    model_parallel_group: object = None
    enable_batch_encryption: bool = False

    def __post_init__(self) -> None:
        if self.enable_batch_encryption:
            raise JobFailedError(
                "CacheResumeMMAPConfig(enable_batch_encryption=True): no batches are stored, so none are encrypted",
                hint="Leave enable_batch_encryption out.",
            )


class _Around(LightningDataModule):
    """A data module that wraps the script's data module, and forwards the lookup of attributes to it."""

    def __init__(self, data_module: Any) -> None:
        super().__init__()
        self.data_module = data_module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "data_module" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.data_module, name)

    def setup(self, stage: str | None = None) -> None:
        self.data_module.setup(stage)

    def train_dataloader(self) -> Any:
        return self.data_module.train_dataloader()

    def val_dataloader(self) -> Any:
        return self._loader_of("val_dataloader")

    def test_dataloader(self) -> Any:
        return self._loader_of("test_dataloader")

    def predict_dataloader(self) -> Any:
        return self._loader_of("predict_dataloader")

    def _loader_of(self, name: str) -> Any:
        return getattr(self.data_module, name)() if hasattr(self.data_module, name) else None

    def get_underlying_data_module(self) -> Any:
        """Return the script's own data module."""
        return self.data_module

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Call `load_checkpoint` of the script's data module, if it has this method."""
        if hasattr(self.data_module, "load_checkpoint"):
            self.data_module.load_checkpoint(checkpoint)


class CheckpointlessDataModule(_Around):
    """A wrapper of the script's data module that adds nothing, because the runtime itself stops the loaders after a
    fault."""

    def __init__(self, cfg: object = None, data_module: Any = None, **_: Any) -> None:
        """Wrap `data_module`. Raises ValueError if `data_module` is None."""
        if data_module is None:
            raise ValueError("data_module must be provided")
        super().__init__(data_module)
        self.cfg = cfg


class MMAPDataModule(_Around):
    """A data module with the position `global_step`, the number of batches that this rank has received."""

    def __init__(
        self,
        data_module: Any,
        mmap_config: MMAPConfig,
        parallel_state_util: object = None,
        is_data_loading_rank: object = None,
    ) -> None:
        super().__init__(data_module)
        self.mmap_config, self.global_step = mmap_config, 0

    def train_dataloader(self) -> Any:
        """Return the data module's loader, which continues from the position `global_step`.

        A loader that is no DataLoader is returned unchanged, because the loader may keep its own position.
        """
        loader = self.data_module.train_dataloader()
        return PositionedBatches(self, loader) if isinstance(loader, DataLoader) else loader

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Set the position to `checkpoint["global_step"]`, the number of batches to skip."""
        self.global_step = int(checkpoint["global_step"])

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.load_checkpoint(state_dict)


class PositionedBatches:
    """Iterates over the batches of a DataLoader, starting at the position of the data module. The job's seed determines
    all random numbers, such as the order of shuffled samples."""

    def __init__(self, module: MMAPDataModule, loader: Any) -> None:
        self.base_dataloader, self.batch_sampler, self._module = loader, loader.batch_sampler, module

    def __len__(self) -> int:
        """Return the number of batches that the next iteration yields."""
        return len(self.base_dataloader) - self._module.global_step % len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch. Samples of earlier batches are not read."""
        config = RuntimeConfig.from_json(os.environ[ENV_RUNTIME]) if ENV_RUNTIME in os.environ else None
        data = EpochData(
            self.base_dataloader,
            seed=0 if config is None else config.seed,
            rank=world_of_this_process()[0],
            warn=sys.stderr.write,
        )
        for _, fetched in data.read(*divmod(self._module.global_step, data.steps_per_epoch)):
            self._module.global_step += 1
            yield fetched[0].batch


class SkipDataLoader(DataLoader[Any]):
    """A DataLoader that leaves out its first `skip_batches` batches."""

    def __init__(self, *arguments: Any, _skip_batches: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._skip_batches = _skip_batches

    @property
    def skip_batches(self) -> int:
        return self._skip_batches

    @skip_batches.setter
    def skip_batches(self, number: int) -> None:
        self._skip_batches = number

    def __iter__(self) -> Any:
        return islice(super().__iter__(), self._skip_batches, None)
