"""Published architectures of well-known models, from which the size of the training state is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from hyperpod_ext.config.files.nearest import suggest
from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.planner.shapes import Decoder, Experts, LatentAttention


def _gpt2(layers: int, hidden: int, heads: int) -> Decoder:
    return Decoder(
        layers,
        hidden,
        heads,
        4 * hidden,
        50257,
        positions=1024,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        fused="qkv",
        norm="layer",
        tied=True,
    )


def _neox(layers: int, hidden: int, heads: int, vocab: int) -> Decoder:
    return replace(_gpt2(layers, hidden, heads), vocab=vocab, positions=0, tied=False)


def _llama3(layers: int, hidden: int, heads: int, ffn: int, head_dim: int | None = None, tied: bool = False) -> Decoder:
    return Decoder(layers, hidden, heads, ffn, 128256, kv_heads=8, head_dim=head_dim, tied=tied)


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool = False) -> Decoder:
    return Decoder(layers, hidden, heads, ffn, vocab, kv_heads=kv_heads, qkv_bias=True, tied=tied)


def _gemma2(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> Decoder:
    return Decoder(layers, hidden, heads, ffn, 256000, kv_heads=kv_heads, head_dim=head_dim, norms=4, tied=True)


PRESETS: Mapping[str, Decoder] = MappingProxyType(
    {
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "gpt-neo-1.3b": replace(_gpt2(24, 2048, 16), positions=2048, qkv_bias=False, fused="none"),
        "gpt-neox-20b": _neox(44, 6144, 64, 50432),
        "pythia-6.9b": _neox(32, 4096, 32, 50432),
        "llama2-7b": Decoder(32, 4096, 32, 11008, 32000),
        "llama2-13b": Decoder(40, 5120, 40, 13824, 32000),
        "llama2-70b": Decoder(80, 8192, 64, 28672, 32000, kv_heads=8),
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3.1-405b": _llama3(126, 16384, 128, 53248),
        "llama3.2-1b": _llama3(16, 2048, 32, 8192, head_dim=64, tied=True),
        "llama3.2-3b": _llama3(28, 3072, 24, 8192, head_dim=128, tied=True),
        "mistral-7b": Decoder(32, 4096, 32, 14336, 32000, kv_heads=8),
        "mixtral-8x7b": Decoder(32, 4096, 32, 14336, 32000, kv_heads=8, experts=Experts(8, 14336)),
        "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 151936, tied=True),
        "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, 152064),
        "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568, 152064),
        "qwen3-8b": Decoder(36, 4096, 32, 12288, 151936, kv_heads=8, head_dim=128, head_norm=True),
        "gemma2-2b": _gemma2(26, 2304, 8, 4, 256, 9216),
        "gemma2-9b": _gemma2(42, 3584, 16, 8, 256, 14336),
        "gemma2-27b": _gemma2(46, 4608, 32, 16, 128, 36864),
        "deepseek-v3": Decoder(
            61,
            7168,
            128,
            18432,
            129280,
            latent=LatentAttention(query_rank=1536, key_value_rank=512, plain_dim=128, rotary_dim=64, value_dim=128),
            experts=Experts(256, 2048, shared=1, dense_layers=3, correction_bias=True),
        ),
        "olmo-7b": Decoder(32, 4096, 32, 11008, 50304, norm="none"),
        "phi3-mini": Decoder(32, 3072, 32, 8192, 32064, fused="qkv+gate"),
        "falcon-7b": Decoder(
            32, 4544, 71, 18176, 65024, kv_heads=1, gated=False, fused="qkv", norm="layer", norms=1, tied=True
        ),
    }
)
"""Architectures by the name of the model. Layers that only pretraining uses are left out, such as DeepSeek-V3's
multi-token prediction."""


def preset(name: str) -> Decoder:
    """Return the architecture of the model with the name `name`.

    Raises:
        NotFoundError: there is no preset for a model with this name.
    """
    if name not in PRESETS:
        raise NotFoundError(f"there is no preset of a model {name!r}", hint=suggest(name, PRESETS))
    return PRESETS[name]
