"""FSDP2 modules that are left in the middle of a step, used again: one rank, with whichever torch is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from world_of_one import world_of_one

from hyperpod_ext.runtime.state import interrupted_fsdp
from hyperpod_ext.runtime.torch_requirements.private_names import TABLE, Feature

pytestmark = pytest.mark.skipif(
    not interrupted_fsdp.can_be_reset(), reason="with this torch what run.keep returned is built anew after a fault"
)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with world_of_one():
        yield


def sharded(policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    fully_shard(layer, mp_policy=policy or MixedPrecisionPolicy())
    return layer


def state_of(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def loss_of(module: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = module(torch.ones(2, 4)).float().square().sum()
    return loss


def gradient_of(module: nn.Module) -> torch.Tensor:
    gradient: Any = module.weight.grad
    assert gradient is not None
    whole: torch.Tensor = gradient.full_tensor()
    return whole


def test_objects_of_this_torch_have_every_private_name_that_is_used():
    """The check at start looks at classes."""
    module = sharded()
    loss_of(module)
    state = state_of(module)
    (group,) = state._fsdp_param_groups
    holders = {type(thing).__name__: thing for thing in (state, group, group.fsdp_params[0])}
    used = [(each.holder.rpartition(":")[2], each.name) for each in TABLE if each.feature is Feature.KEPT_FSDP2]
    found = [(kind, name, hasattr(holders[kind], name)) for kind, name in used if kind in holders]
    assert len(found) == 8
    assert [name for *name, there in found if not there] == []


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["plain", "mixed"])
def test_gradients_that_were_being_accumulated_are_dropped(policy):
    undisturbed, module = sharded(policy), sharded(policy)
    loss_of(undisturbed).backward()
    module.set_requires_gradient_sync(False)
    loss_of(module).backward()  # kept whole, beside the shards; torch 2.13 has another place for it if mixed
    module.set_requires_gradient_sync(True)
    interrupted_fsdp.reset([state_of(module)])
    assert module.weight.grad is None
    loss_of(module).backward()
    assert torch.equal(gradient_of(module), gradient_of(undisturbed))


def test_a_forward_that_no_backward_follows_is_forgotten():
    undisturbed, module = sharded(), sharded()
    loss_of(undisturbed).backward()
    loss_of(module)
    interrupted_fsdp.reset([state_of(module)])
    loss_of(module).backward()
    assert torch.equal(gradient_of(module), gradient_of(undisturbed))


@pytest.mark.skipif(
    not hasattr(FSDPModule, "finalize_backward"),
    reason="this torch cannot be told to reduce in the background; 2.15 can",
)
def test_a_reduction_that_nobody_waits_for_is_dropped_by_whichever_root_shares_it():
    from torch.distributed.fsdp import share_comm_ctx

    undisturbed, first, second = sharded(), sharded(), sharded()
    loss_of(undisturbed).backward()
    share_comm_ctx([first, second])
    loss_of(first).backward()
    second.set_manual_backward_finalization(True)
    loss_of(second).backward()
    handle = second.finalize_backward(async_op=True)
    interrupted_fsdp.reset([state_of(first), state_of(second)])
    with pytest.raises(RuntimeError, match="invalidated"):
        handle.wait()
    for module in (first, second):
        module.zero_grad()
        module.set_manual_backward_finalization(False)
        loss_of(module).backward()
        assert torch.equal(gradient_of(module), gradient_of(undisturbed))
