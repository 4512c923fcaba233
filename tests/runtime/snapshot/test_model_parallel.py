"""Parts of a model in plain tensors: whose they are is in their names, and ranks of another part hold no replica."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.dcp_metadata import RankFile, derive
from hyperpod_ext.runtime.snapshot.image import Layout
from hyperpod_ext.runtime.state.training_state import CapturedState, TrainingState

GROUPS = "megatron.core.parallel_state"
WEIGHT = "model.weight"


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 1 of four: two parts, each on two ranks. The real one is asked in tests/integrations/test_trainers.py."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    groups: Any = ModuleType(GROUPS)
    groups.model_parallel_is_initialized = lambda: True
    for kind in ("tensor", "pipeline", "expert"):
        setattr(groups, f"get_{kind}_model_parallel_rank", lambda: 0)
        setattr(groups, f"get_{kind}_model_parallel_world_size", lambda: 1)
    alike = dist.new_group([1, 3])
    groups.get_data_parallel_group = lambda with_context_parallel: alike
    groups.get_tensor_model_parallel_rank = lambda: 1
    groups.get_tensor_model_parallel_world_size = lambda: 2
    monkeypatch.setitem(sys.modules, GROUPS, groups)
    yield groups
    dist.destroy_process_group()


def captured() -> CapturedState:
    return TrainingState({"model": torch.nn.Linear(2, 2)}).take()


def test_ranks_of_another_part_are_no_replicas(megatron: Any) -> None:
    assert captured().sharing() == "same:1,3"
    assert captured().is_sharded, "it is of no use in a world of another size"


def test_experts_are_of_one_rank_alone(megatron: Any) -> None:
    megatron.get_expert_model_parallel_world_size = lambda: 2
    assert captured().sharing() == "shard"


def test_a_model_that_is_in_one_part_has_its_names(megatron: Any) -> None:
    megatron.get_tensor_model_parallel_world_size = lambda: 1
    assert captured().sharing() == "same"
    assert [item.fqn for item in Layout(captured().parts).plan.items] == [WEIGHT, "model.bias"]


def test_plain_pytorch_finds_each_part_under_a_name_of_its_own(megatron: Any) -> None:
    """And none under the name of the whole, of which it would read one part without a word."""
    files = []
    for rank in range(2):
        megatron.get_tensor_model_parallel_rank = lambda rank=rank: rank
        files.append(RankFile(rank, Layout(captured().parts).plan, [], f"{rank}.distcp"))
    metadata = pickle.loads(derive(files, "values").metadata)  # our own, for PyTorch to read
    assert {name for name in metadata.state_dict_metadata if "weight" in name} == {
        f"{WEIGHT} (tensor 1 of 2)",
        f"{WEIGHT} (tensor 2 of 2)",
    }


def test_an_optimizer_that_holds_a_part_without_saying_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.core.optimizer.distrib_optimizer"
    module: Any = ModuleType(name)

    class DistributedOptimizer:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    module.DistributedOptimizer = DistributedOptimizer
    monkeypatch.setitem(sys.modules, name, module)
    below = torch.optim.SGD([torch.zeros(1)])
    above = DistributedOptimizer(below)
    with pytest.raises(JobFailedError, match=r"restore\(optimizer=...\): Megatron's distributed optimizer") as raised:
        TrainingState({"optimizer": below})
    assert raised.value.hint
    del above
    TrainingState({"optimizer": torch.optim.SGD([torch.zeros(1)])})
