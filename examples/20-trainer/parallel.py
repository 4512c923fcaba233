"""Division of a model among ranks: FSDP2 over the mesh dimension `dp`, tensor parallelism (TP) over `tp`.

No function here communicates, so healthy processes keep the model after a fault: `run.keep` need not build it again.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from model import Block, Experts, Model, Shape, initialize
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)


def make_mesh(device: str, world_size: int, tensor: int) -> DeviceMesh:
    """Return a mesh in which each model copy is on `tensor` neighbouring ranks."""
    if world_size % tensor:
        raise SystemExit(f"--tensor {tensor} does not divide the {world_size} ranks. Choose a divisor.")
    return init_device_mesh(device, (world_size // tensor, tensor), mesh_dim_names=("dp", "tp"))


def build_model(shape: Shape, mesh: DeviceMesh, *, bf16: bool, recompute: bool, compiled: bool) -> Model:
    """Return a model with first weights, of which this process holds only its part: the blocks are made one by one."""
    if shape.num_key_value_heads % mesh["tp"].size():
        raise ValueError(
            f"--tensor {mesh['tp'].size()} does not divide {shape.num_key_value_heads} key and value heads."
        )
    with torch.device("meta"):
        model = Model(shape)
    policy = MixedPrecisionPolicy()
    if bf16:  # compute in bfloat16; weights, gradients and the optimizer stay float32
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        assert isinstance(block, Block)
        fill(block, shape, mesh)
        if mesh["tp"].size() > 1:
            parallelize_module(block, mesh["tp"], plan_of_block(shape), src_data_rank=None)
        block.recompute = recompute
        if compiled:  # sizes within a mixture of experts depend on the data
            (block.attention if shape.num_local_experts else block).compile()
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    for part in (model.embed, model.norm, model.head):
        fill(part, shape, mesh)
    if mesh["tp"].size() > 1:
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),  # rows are tokens
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    return model


def fill(part: nn.Module, shape: Shape, mesh: DeviceMesh) -> None:
    """Give a part of the model memory and first weights, the same ones on every rank."""
    part.to_empty(device=mesh.device_type)
    initialize(part, shape.num_hidden_layers)


def plan_of_block(shape: Shape) -> dict[str, ParallelStyle]:
    """Return the TP style of each module: split outputs first, split inputs second, so that one sum is needed."""
    plan: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(),
    }
    if shape.num_local_experts:
        return plan | {"mlp.experts": SplitExperts()}
    # one sum of the gradients of gate's and up's input, instead of two
    both = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    return plan | {
        "mlp": both,
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }


class SplitExperts(ParallelStyle):
    """Each rank has a part of the inner size of every expert. The router runs on each rank, with equal results."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self.split, self.enter, self.leave)

    @staticmethod
    def split(_name: str, experts: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(experts, Experts)
        for name, dimension in (("gate", 1), ("up", 1), ("down", 2)):
            weights = distribute_tensor(getattr(experts, name), mesh, [Shard(dimension)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(weights))

    @staticmethod
    def enter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x, counts = inputs  # each rank computes a part of the gradient of x
        return DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()]), counts

    @staticmethod
    def leave(_module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return DTensor.from_local(output, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def meshes_of(model: nn.Module) -> dict[DeviceMesh, list[nn.Parameter]]:
    """Return the parameters by mesh: with TP, norms and routers are divided over `dp` only. No operation mixes them."""
    found: dict[DeviceMesh, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        found[parameter.device_mesh].append(parameter)
    return found


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """Return AdamW. Weights of norms do not decay."""
    groups: list[dict[str, Any]] = []
    for parameters in meshes_of(model).values():
        for decays in (True, False):
            if found := [one for one in parameters if (one.dim() > 1) == decays]:
                groups.append({"params": found, "weight_decay": weight_decay if decays else 0.0})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def clip_gradients(model: nn.Module, limit: float) -> torch.Tensor:
    """Scale the gradients so that their norm over all ranks is at most `limit`; return the norm before."""
    by_mesh = list(meshes_of(model).values())
    norms = [
        nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]) for parameters in by_mesh
    ]
    norm = torch.stack([one.full_tensor() if isinstance(one, DTensor) else one for one in norms]).norm()
    for parameters in by_mesh:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
