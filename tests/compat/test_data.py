"""Data modules around the script's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hyperpod_ext.compat.checkpointless.data import (
    CacheResumeMMAPConfig,
    CheckpointlessDataModule,
    MMAPDataModule,
    SkipDataLoader,
)
from hyperpod_ext.errors import JobFailedError


class Numbers(Dataset[int]):
    """The numbers from 0, and a list of those that were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Own:
    """A data module of a script."""

    global_batch_size = 6

    def __init__(self, **options: Any) -> None:
        self.samples, self.options, self.stages = Numbers(), options, list[str | None]()

    def setup(self, stage: str | None) -> None:
        self.stages.append(stage)

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_size=2, **self.options)

    def val_dataloader(self) -> Any:
        return "validation"


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "num_workers": 1}])
def test_the_loader_continues_at_the_position(options: dict[str, Any]) -> None:
    undisturbed = MMAPDataModule(Own(**options), CacheResumeMMAPConfig())
    loader = undisturbed.train_dataloader()
    assert len(loader) == 6
    epochs = [batches(loader), batches(loader)]
    assert undisturbed.state_dict() == {"global_step": 12}
    if options:
        assert epochs[0] != epochs[1]
    for position in (0, 4, 6, 8):
        again = MMAPDataModule(Own(**options), CacheResumeMMAPConfig())
        again.load_checkpoint({"global_step": position})
        epoch, made = divmod(position, 6)
        assert len(again.train_dataloader()) == 6 - made
        assert batches(again.train_dataloader()) == epochs[epoch][made:]


def test_samples_before_the_position_are_not_read() -> None:
    own = Own()
    module = MMAPDataModule(own, CacheResumeMMAPConfig())
    module.load_state_dict({"global_step": 5})
    assert batches(module.train_dataloader()) == [[10, 11]]
    assert own.samples.read == [10, 11]


def test_all_else_is_passed_on() -> None:
    own = Own()
    module = CheckpointlessDataModule(cfg=None, data_module=MMAPDataModule(own, CacheResumeMMAPConfig()))
    module.setup("fit")
    assert own.stages == ["fit"]
    assert (module.global_batch_size, module.val_dataloader(), module.predict_dataloader()) == (6, "validation", None)
    module.load_checkpoint({"global_step": 3})
    assert module.data_module.global_step == 3
    assert module.get_underlying_data_module().get_underlying_data_module() is own
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018
    with pytest.raises(ValueError, match="data_module"):
        CheckpointlessDataModule()


def test_a_loader_with_a_position_of_its_own_stays() -> None:
    own, other = Own(), [torch.zeros(1)]
    own.train_dataloader = lambda: other  # type: ignore[method-assign]
    assert MMAPDataModule(own, CacheResumeMMAPConfig()).train_dataloader() is other


def test_encryption_is_refused() -> None:
    with pytest.raises(JobFailedError, match="no batches are stored"):
        CacheResumeMMAPConfig(enable_batch_encryption=True)


def test_first_batches_are_left_out() -> None:
    loader = SkipDataLoader(Numbers(), batch_size=4, _skip_batches=2)
    assert batches(loader) == [[8, 9, 10, 11]]
    loader.skip_batches = 0
    assert len(batches(loader)) == 3
