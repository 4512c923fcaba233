"""Computes names and shapes of a transformer's tensors from its architecture, so that sizes are exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention of DeepSeek: queries and keys are computed through narrow layers with norms."""

    query_rank: int
    key_value_rank: int
    plain_dim: int
    """Number of dimensions of a head's query and key that rotary position embeddings do not rotate."""
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, which replaces the feed-forward layer."""

    count: int
    ffn: int
    """Inner width of each expert."""
    shared: int = 0
    """Number of shared experts, which every token goes through."""
    dense_layers: int = 0
    """Number of layers at the start of the model that have an ordinary feed-forward layer instead of experts."""
    correction_bias: bool = False
    """Whether the router has a bias for each expert that is stored as a buffer, because gradients do not change it."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder-only transformer, as its paper or published configuration describes it."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int | None = None
    """Number of attention heads for keys and values. Default: `heads`."""
    head_dim: int | None = None
    """Number of dimensions of an attention head. Default: hidden / heads."""
    gated: bool = True
    """Whether the feed-forward layer has a gate, and therefore three matrices instead of two."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused: Literal["none", "qkv", "qkv+gate"] = "none"
    """Which matrices are fused into one tensor. Fusion does not change the total size."""
    norm: Literal["rms", "layer", "none"] = "rms"
    """Kind of normalization layer: `rms` has one parameter per channel, `layer` has two, `none` has no parameters."""
    norms: int = 2
    """Number of normalization layers in each transformer layer."""
    head_norm: bool = False
    """Whether queries and keys are normalized in each attention head."""
    positions: int = 0
    """Number of learned position embeddings. 0 if the position embeddings have no parameters."""
    tied: bool = False
    """Whether the output layer uses the weights of the input embedding."""
    head_bias: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None

    def parameters(self) -> Named:
        """Yield name and shape of every trained tensor. A tensor that two layers share is yielded only once."""
        yield "embedding", (self.vocab, self.hidden)
        if self.positions:
            yield "positions", (self.positions, self.hidden)
        for layer in range(self.layers):
            for name, shape in (*self._attention(), *self._feed_forward(layer)):
                yield f"layers.{layer}.{name}", shape
            for index in range(self.norms):
                yield from self._norm(f"layers.{layer}.norm{index}", self.hidden)
        yield from self._norm("norm", self.hidden)
        if not self.tied:
            yield from _linear("head", self.vocab, self.hidden, self.head_bias)

    def buffers(self) -> Named:
        """Yield name and shape of every buffer in a checkpoint. Optimizers do not change buffers."""
        if self.experts is not None and self.experts.correction_bias:
            for layer in range(self.experts.dense_layers, self.layers):
                yield f"layers.{layer}.router.correction", (self.experts.count,)

    def count(self) -> int:
        """Return the number of parameters of the model."""
        return sum(prod(shape) for _, shape in self.parameters())

    def _attention(self) -> Named:
        if self.latent is not None:
            yield from self._latent(self.latent)
            return
        head = self.head_dim or self.hidden // self.heads
        queries, keys = self.heads * head, (self.kv_heads or self.heads) * head
        if self.fused == "none":
            for name, width in (("query", queries), ("key", keys), ("value", keys)):
                yield from _linear(f"attention.{name}", width, self.hidden, self.qkv_bias)
        else:
            yield from _linear("attention.qkv", queries + 2 * keys, self.hidden, self.qkv_bias)
        if self.head_norm:
            yield from self._norm("attention.query_norm", head)
            yield from self._norm("attention.key_norm", head)
        yield from _linear("attention.out", self.hidden, queries, self.out_bias)

    def _latent(self, its: LatentAttention) -> Named:
        yield "attention.query_down", (its.query_rank, self.hidden)
        yield from self._norm("attention.query_norm", its.query_rank)
        yield "attention.query_up", (self.heads * (its.plain_dim + its.rotary_dim), its.query_rank)
        yield "attention.key_value_down", (its.key_value_rank + its.rotary_dim, self.hidden)
        yield from self._norm("attention.key_value_norm", its.key_value_rank)
        yield "attention.key_value_up", (self.heads * (its.plain_dim + its.value_dim), its.key_value_rank)
        yield "attention.out", (self.hidden, self.heads * its.value_dim)

    def _feed_forward(self, layer: int) -> Named:
        if self.experts is None or layer < self.experts.dense_layers:
            yield from self._mlp("mlp", self.ffn)
            return
        yield "router", (self.experts.count, self.hidden)
        for expert in range(self.experts.count):
            yield from self._mlp(f"experts.{expert}", self.experts.ffn)
        if self.experts.shared:
            yield from self._mlp("experts.shared", self.experts.shared * self.experts.ffn)

    def _mlp(self, name: str, inner: int) -> Named:
        if self.gated and self.fused == "qkv+gate":
            yield from _linear(f"{name}.gate_up", 2 * inner, self.hidden, self.mlp_bias)
        else:
            for part in ("gate", "up") if self.gated else ("up",):
                yield from _linear(f"{name}.{part}", inner, self.hidden, self.mlp_bias)
        yield from _linear(f"{name}.down", self.hidden, inner, self.mlp_bias)

    def _norm(self, name: str, width: int) -> Named:
        if self.norm != "none":
            yield f"{name}.scale", (width,)
        if self.norm == "layer":
            yield f"{name}.shift", (width,)


def _linear(name: str, out: int, into: int, bias: bool) -> Named:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)
