"""Models in the shape of Llama and Mixtral, in plain PyTorch.

The rotary embedding rotates the two halves of a head, as in Hugging Face's models, so that their weights fit unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, with the names of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    """Settings of Llama 3.1's longer context; None: no scaling."""
    num_local_experts: int = 0
    """Experts of each block; 0: one MLP for all tokens, as in Llama."""
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.02

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


SHAPES = {
    "llama-tiny": Shape(256, 64, 192, 2, 4, 2),
    "moe-tiny": Shape(256, 64, 96, 2, 4, 2, num_local_experts=4),
    "llama-debug": Shape(2048, 256, 768, 6, 16, 16, rope_theta=500_000.0),  # as TorchTitan's debug model
    "llama-8b": Shape(128_256, 4096, 14_336, 32, 32, 8, 8192, rope_theta=500_000.0),
    "mixtral-8x7b": Shape(32_000, 4096, 14_336, 32, 32, 8, 32_768, rope_theta=1e6, num_local_experts=8),
}


def rotations(shape: Shape, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotary embedding, both of shape [length, head_dim]."""
    numbers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / shape.rope_theta ** (numbers / shape.head_dim)
    if scaling := shape.rope_scaling:  # Llama 3.1: slow rotations become slower, fast ones stay
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = kept * frequencies + (1.0 - kept) * frequencies / scaling["factor"]
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads of shape [batch, heads, length, head_dim] by their positions."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention. Groups of query heads share a key and value head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, width = shape.head_dim, shape.hidden_size
        self.q = nn.Linear(width, shape.num_attention_heads * self.head_dim, bias=False)
        self.k = nn.Linear(width, shape.num_key_value_heads * self.head_dim, bias=False)
        self.v = nn.Linear(width, shape.num_key_value_heads * self.head_dim, bias=False)
        self.o = nn.Linear(shape.num_attention_heads * self.head_dim, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # with tensor parallelism a rank has some of the heads: their number follows from the width
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """The gated network of Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Networks like `MLP`, with the weights of all experts in one tensor."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        experts, width, inner = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
        self.gate = nn.Parameter(torch.empty(experts, inner, width))
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the outputs for `x`: `counts[0]` tokens of expert 0, then those of expert 1, and so on."""
        # tensor parallelism makes DTensors of the weights; parallel.py sums the outputs of the ranks
        weights = (getattr(one, "to_local", lambda one=one: one)() for one in (self.gate, self.up, self.down))
        parts = zip(x.split(counts), *weights, strict=True)
        return torch.cat(
            [F.linear(F.silu(F.linear(one, gate)) * F.linear(one, up), down) for one, gate, up, down in parts]
        )


class MoE(nn.Module):
    """Mixture of experts: the router sends each token to a few of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.count, self.used = shape.num_local_experts, shape.num_experts_per_tok
        self.router = nn.Linear(shape.hidden_size, self.count, bias=False)
        self.experts = Experts(shape)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the balance loss, which is least if all experts have equally many tokens."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).float().softmax(dim=-1)
        weights, chosen = scores.topk(self.used, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        counts = chosen.flatten().bincount(minlength=self.count)
        order = chosen.flatten().argsort(stable=True)
        copies = tokens.unsqueeze(1).expand(-1, self.used, -1).flatten(0, 1)  # one for each chosen expert
        outputs = self.experts(copies[order], counts.tolist())[order.argsort()].unflatten(0, (-1, self.used))
        balance = self.count * (counts / len(tokens) * scores.mean(dim=0)).sum()
        return (outputs * weights.unsqueeze(-1)).sum(dim=1).view_as(x), balance


class Block(nn.Module):
    """One layer of the model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MoE(shape) if shape.num_local_experts else MLP(shape)
        self.recompute = False
        """Activation checkpointing: keep the block's input only, and compute the rest again in the backward pass."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, cos, sin, use_reentrant=False)
        return self.compute(x, cos, sin)

    def compute(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp(self.mlp_norm(x))
        y, balance = y if isinstance(y, tuple) else (y, x.new_zeros(()))
        return x + y, balance


class Model(nn.Module):
    """Predicts the next token at each position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of predicting the targets, and the mean balance loss, 0 without experts."""
        logits, balance = self.logits(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), balance

    def logits(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the next tokens, and the balance loss."""
        cos, sin = rotations(self.shape, tokens.shape[1], tokens.device)
        x, balances = self.embed(tokens), []
        for block in self.blocks:
            x, balance = block(x, cos, sin)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()


def initialize(part: nn.Module, layers: int) -> None:
    """Draw the first weights of a part of the model. `layers`: blocks of the whole model."""
    for name, parameter in part.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)  # of a norm
        else:
            adds = name.endswith(("o.weight", "down.weight", "down"))  # its output is added to the block's input
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)
