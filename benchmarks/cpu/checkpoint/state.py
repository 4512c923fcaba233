"""The state that every system saves: a GPT with its Adam moments, and a pattern that tells each save from any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

VOCABULARY, CONTEXT, HEADS = 8192, 512, 8
LAYERS = {"plain": 12, "sharded": 8}
"""Plain: the 148 parameters of GPT-2 small. Sharded: 100 parameters, so 300 DTensors with their moments."""

State = dict[str, Any]


class Block(nn.Module):
    """Attention over what came before, then a small network, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Like GPT-2: learned places, and the embedding is the head too."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.words.weight)


def width_for(nbytes: int, layers: int) -> int:
    """The least width, in whole heads, whose weights and moments take `nbytes`."""
    width = 2 * HEADS
    while 12 * (layers * (12 * width**2 + 13 * width) + (VOCABULARY + CONTEXT + 2) * width) < nbytes:
        width += 2 * HEADS
    return width


def build(kind: str, nbytes: int, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer whose state takes about `nbytes` a rank; moments exist."""
    torch.manual_seed(1)
    layers = LAYERS[kind]
    sharded = kind == "sharded"
    model: nn.Module = GPT(width_for(nbytes * (world_size if sharded else 1), layers), layers)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size,))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """What is saved, by name as torch's own get_state_dict names it; the tensors are those in use."""
    names = [name for name, _ in model.named_parameters()]
    moments = [optimizer.state[parameter] for parameter in model.parameters()]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"model": weights, "optimizer": {name: dict(each) for name, each in zip(names, moments, strict=True)}}


def leaves(state: State) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of it that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(state: State) -> list[torch.Tensor]:
    return [local(tensor) for tensor in leaves(state)]


def local_state(state: State) -> State:
    """The same tree with DTensors as this rank's parts, for systems that know none."""
    return {
        name: local_state(value) if isinstance(value, dict) else local(value.detach()) for name, value in state.items()
    }


def nbytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in locals_of(state))


def fill(state: State, step: int, rank: int) -> None:
    """Make it the state of `step`: no two tensors, steps or ranks have the same bytes."""
    for flat, first in _patterns(state, step, rank):
        torch.arange(first, first + len(flat), out=flat)


def is_state(state: State, step: int, rank: int) -> bool:
    """Whether every tensor is torch.equal to what `fill` made it."""
    return all(
        torch.equal(flat, torch.arange(first, first + len(flat), dtype=torch.int32))
        for flat, first in _patterns(state, step, rank)
    )


def _patterns(state: State, step: int, rank: int) -> Iterator[tuple[torch.Tensor, int]]:
    for index, tensor in enumerate(leaves(state)):
        # what is not sharded is the same on every rank, and a system may keep any rank's copy of it
        owner = rank if isinstance(tensor, DTensor) else 0
        flat = local(tensor).view(-1).view(torch.int32)
        yield flat, index * 100_003 + step * 1009 + owner * 17
